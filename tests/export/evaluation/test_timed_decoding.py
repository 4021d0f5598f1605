"""Bytes of weights that drafting reads, counted call by call, the target's shared weights included."""

from collections.abc import Sequence

import pytest
import torch
from draftsmith.export.evaluation.timed_decoding import Meter, metered, target_bytes
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    Ensemble,
    Hydra,
    HydraConfig,
    LayerDraft,
    Medusa,
    MedusaConfig,
    Policy,
    PromptLookup,
    PromptLookupConfig,
    Proposer,
    Request,
    Target,
    Union,
    decode,
)
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer

SHORT = Request((5, 9, 30), 0, 12)


def read(target: Target, drafter: Proposer, policy: Policy, requests: Sequence[Request] = (SHORT,),
         prefill_chunk: int = 512) -> tuple[int, int]:
    """(bytes that drafting read, verifying passes) of short answers."""
    meter, settings = Meter(), DecodeSettings(batch_size=2, prefill_chunk=prefill_chunk)
    with metered(drafter, meter):
        stats = decode(target, requests, settings, drafter=drafter, policy=policy).stats
    return meter.drafted, stats.target_calls


def layer_bytes(target: Target, layers: int) -> int:
    return sum(weight.nbytes for layer in list(target.layers)[:layers] for weight in layer.parameters())


def test_a_chain_of_the_first_layers_reads_them_and_the_output_layer_at_each_step(tiny_target: Target) -> None:
    drafted, passes = read(tiny_target, LayerDraft(tiny_target, range(1)), Chain(3))
    assert drafted == 3 * passes * (layer_bytes(tiny_target, 1) + tiny_target.head.weight.nbytes)


def test_heads_read_themselves_and_the_borrowed_rows_once_a_pass(tiny_target: Target) -> None:
    width, entries = tiny_target.hidden_size, 16
    heads = 2 * 4 * (width * width + width)
    ids_Q = torch.arange(entries)
    for output, vocabulary, rows in (("shared", None, tiny_target.vocab_size), ("shared", entries, entries),
                                     ("copy", entries, 2 * entries), ("one_copy", entries, entries)):
        config = MedusaConfig(num_heads=2, output=output, vocabulary_size=vocabulary)  # type: ignore[arg-type]
        drafter = Medusa.create(config, tiny_target, None if vocabulary is None else ids_Q)
        drafted, passes = read(tiny_target, drafter, Chain(2))
        assert drafted == passes * (heads + 4 * rows * width), (output, vocabulary)


def test_one_copy_is_read_whole_at_each_level_of_hydra(tiny_target: Target) -> None:
    drafter = Hydra.create(HydraConfig(num_heads=2, output="one_copy", vocabulary_size=16), tiny_target,
                           torch.arange(16))
    drafted, passes = read(tiny_target, drafter, Chain(2))
    heads = sum(weight.nbytes for weight in drafter.heads.parameters())
    assert drafted == passes * (heads + 2 * 4 * (16 * tiny_target.hidden_size + 16))


def test_copying_text_reads_no_weight_and_an_ensemble_reads_what_its_parts_read(tiny_target: Target) -> None:
    lookup = PromptLookup(PromptLookupConfig(copied=3), tiny_target.device)
    assert read(tiny_target, lookup, Chain(3))[0] == 0
    layers = LayerDraft(tiny_target, range(1))
    drafted, passes = read(tiny_target, Ensemble([lookup, layers]), Union([Chain(3), Chain(3)], 8))
    assert drafted == 3 * passes * layers.expand_bytes() > 0


@pytest.mark.parametrize("prefill_chunk", [2, 512])
def test_a_prefix_layer_is_read_once_a_verifying_pass_and_prompts_do_not_count(tiny_target: Target,
                                                                              prefill_chunk: int) -> None:
    drafter = Hydra.create(HydraConfig(num_heads=2, num_layers=2, prefix=True), tiny_target)
    # The third prompt is read between the passes of the others.
    requests = [Request(tuple(range(5, 14 + place)), place, 6 + 3 * place) for place in range(3)]
    drafted, passes = read(tiny_target, drafter, Chain(2), requests, prefill_chunk)
    assert drafter.observe_bytes() > 0
    assert drafted == passes * (2 * drafter.expand_bytes() + drafter.observe_bytes())


def test_counting_ends_with_the_block(tiny_target: Target) -> None:
    drafter = LayerDraft(tiny_target, range(1))
    with pytest.raises(RuntimeError), metered(drafter, Meter()):
        raise RuntimeError
    assert not {"expand", "observe"} & set(vars(drafter))


@pytest.mark.parametrize("tied", [True, False])
def test_of_the_embedding_only_an_output_layer_is_read(tied: bool) -> None:
    model = tiny_model()
    if tied:
        model.set_output_embeddings(torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False))
        model.lm_head.weight = model.get_input_embeddings().weight
    target = Target(model, tiny_tokenizer(), name="tiny")
    embedding = model.get_input_embeddings().weight.nbytes
    layers = layer_bytes(target, target.num_layers)
    norm = model.config.hidden_size * 4
    assert target_bytes(target) == layers + norm + embedding  # the output layer is as large as the embedding
