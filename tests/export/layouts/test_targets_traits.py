"""Every layout against every trait of a target: a plain reader of the file gives the drafter's own logits, or the
layout refuses the trait by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from draftsmith.modules import (
    BlockDraft,
    BlockDraftConfig,
    Drafter,
    DraftLM,
    DraftLMConfig,
    Eagle,
    Eagle3,
    Eagle3Config,
    EagleConfig,
    Features,
    Hydra,
    HydraConfig,
    Kangaroo,
    KangarooConfig,
    Medusa,
    MedusaConfig,
    Target,
    UserError,
)
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from references.engine_readers import READERS, Read
from support.families import IDS, randomised
from support.targets import random_model
from support.tiers import others_long
from transformers import AutoModelForCausalLM

from .test_engine_contracts import written

TOKENS = list(range(5, 60, 4))
MASK = 101  # A row of the embeddings after the tokenizer's last token
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {"tie_word_embeddings": False}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "scaled embeddings in a module": ("Gemma3Text", {}),
    "scaled embeddings and soft caps": ("Gemma2", {"final_logit_softcapping": 3.0}),
    "a logit scale": ("Cohere", {"logit_scale": 0.25}),
    "multipliers": ("Granite", {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "wide heads": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "biases": ("Phi", {}),
}
"""Targets by their trait: an architecture and settings that differ from the shared ones."""


class Kind(NamedTuple):
    """A drafter and the layout that it is written in."""

    layout: str
    make: Callable[[Target], Drafter]
    refused: dict[str, str]  # Traits that the layout cannot hold, each with the words that say so
    reader: str | None = None  # Key of the reader, where it is not the layout


BIAS = {"biases": "the output layer of .* has a bias, for which the layout has no place"}


def third(target: Target, **settings: Any) -> Eagle3:
    ids = IDS if "vocabulary_size" in settings else None
    return Eagle3.create(Eagle3Config(taps=(0, 1, 2), **settings), target, ids)


def medusa(target: Target, **settings: Any) -> Medusa:
    ids = IDS if "vocabulary_size" in settings else None
    return Medusa.create(MedusaConfig(num_heads=2, **settings), target, ids)


def blocks(target: Target, **settings: Any) -> BlockDraft:
    ids = IDS if "vocabulary_size" in settings else None
    given = {"block_size": 3, "aligned": "same", "mask_token_id": MASK, "rank": 8, **settings}
    return BlockDraft.create(BlockDraftConfig(taps=(0, 1, 2), **given), target, ids)


SCALED = dict.fromkeys(("a logit scale", "multipliers", "scaled embeddings and soft caps"),
                       "scales or caps its logits, .* train with correction: none")
REDUCED, MARKOV = {"vocabulary_size": len(IDS)}, {"correction": "markov", "aligned": "next"}
NARROW = {"wide heads": "the official code has heads of 32 / 4 elements, .* of 16"}
KINDS: dict[str, Kind] = {
    "eagle": Kind("eagle", lambda target: Eagle.create(EagleConfig(), target), BIAS),
    "eagle sglang": Kind("eagle-sglang", lambda target: Eagle.create(EagleConfig(bias=False), target), BIAS),
    "eagle3": Kind("eagle", third, BIAS, "eagle3"),
    "eagle3 reduced": Kind("eagle", lambda target: third(target, **REDUCED), BIAS, "eagle3"),
    "eagle3 shared": Kind("eagle", lambda target: third(target, output="shared"), BIAS, "eagle3"),
    "eagle3 window": Kind("eagle", lambda target: third(target, window=7), BIAS, "eagle3"),
    "eagle3 narrow": Kind("eagle", lambda target: third(target, hidden_size=16), BIAS, "eagle3"),
    "speculators": Kind("speculators", lambda target: third(target, output="shared"), BIAS),
    "speculators window": Kind("speculators", lambda target: third(target, window=7, qk_norm=True), BIAS),
    "speculators reduced": Kind("speculators", lambda target: third(target, **REDUCED), BIAS),
    "dflash": Kind("dflash", lambda target: blocks(target, causal=False), BIAS),
    "dflash causal reduced": Kind("dflash", lambda target: blocks(target, **REDUCED), BIAS),
    "dflash window": Kind("dflash", lambda target: blocks(target, causal=False, window=6), BIAS),
    "dspark": Kind("dflash", lambda target: blocks(target, causal=False, **MARKOV), BIAS | SCALED),
    "dspark gated": Kind("dflash", lambda target: blocks(target, **MARKOV | {"correction": "gated"}), BIAS | SCALED),
    "dspark rnn same": Kind("dflash", lambda target: blocks(target, correction="rnn"), BIAS | SCALED),
    "speculators dflash": Kind("speculators", blocks, BIAS, "dflash"),
    "speculators dspark reduced": Kind("speculators", lambda target: blocks(target, **MARKOV, **REDUCED),
                                       BIAS | SCALED, "dflash"),
    "medusa": Kind("medusa", medusa, BIAS),
    "medusa own": Kind("medusa", lambda target: medusa(target, output="copy"), BIAS),
    "medusa reduced": Kind("medusa", lambda target: medusa(target, output="copy", **REDUCED), BIAS),
    "medusa-vllm": Kind("medusa-vllm", lambda target: medusa(target, output="one_copy", **REDUCED), BIAS),
    "hydra": Kind("hydra", lambda target: Hydra.create(HydraConfig(num_heads=2), target), {}),
    "hydra own": Kind("hydra", lambda target: Hydra.create(HydraConfig(num_heads=2, output="copy"), target), {}),
}
"""Drafters by what is special about them."""
CASES = [(trait, kind) for trait in TARGETS for kind in KINDS]
QUICK = [(trait, kind) for trait in ("scaled embeddings in a module", "biases", "scaled embeddings and soft caps")
         for kind in ("eagle", "eagle3 reduced", "speculators", "medusa", "hydra", "dspark",
                                                      "dflash causal reduced")]


def target_of(trait: str) -> Target:
    """A random target with this trait; its weights are far from their initial ones."""
    family, settings = TARGETS[trait]
    model = random_model(family, **{"num_hidden_layers": 4, "num_layers": 4, "vocab_size": MASK + 3, **settings})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return Target(model, tiny_tokenizer(), name=trait)


def drafted(drafter: Drafter, target: Target) -> tuple[Features, torch.Tensor]:
    """(a text with the target's states, the drafter's logits [L, Q] of the first guess at each of its positions)."""
    features = target.encode(Features.from_rows([(TOKENS, [True] * len(TOKENS))]), drafter.taps)
    with torch.no_grad():
        return features, drafter.project(drafter(features).hidden_BLKD[0, :-1, 0], 0)


@pytest.mark.parametrize(("trait", "kind"), others_long(CASES, QUICK))
def test_a_plain_reader_of_the_file_gives_the_drafters_own_logits(trait: str, kind: str, tmp_path: Path) -> None:
    target, (layout, make, refused, reader) = target_of(trait), KINDS[kind]
    drafter = randomised(make(target))
    if trait in refused:
        with pytest.raises(UserError, match=refused[trait]):
            written(drafter, target, layout, tmp_path / "out")
        return
    features, own_LQ = drafted(drafter, target)
    folder = written(drafter, target, layout, tmp_path / "out")
    # As the target's own file has them, whatever its modules make of them.
    stored = target.model.state_dict()
    embedding_VD = next(stored[name] for name in stored if name.endswith("embed_tokens.weight"))
    read = Read(folder, embedding_VD, target.output_weight())
    taps = [features.taps[tap][0, :-1] for tap in drafter.taps]
    found_LV = READERS[reader or layout](read, torch.tensor(TOKENS[1:]), features.final()[0, :-1],
                                         torch.cat(taps, -1) if taps else torch.zeros(0))
    # Engines draft the best token of these: a positive factor and a soft cap change none, and are the target's.
    found_LV = target.post_process(found_LV)
    ids_Q = drafter.token_ids_Q
    torch.testing.assert_close(found_LV if ids_Q is None else found_LV[:, ids_Q], own_LQ, atol=1e-4, rtol=1e-4)
    assert own_LQ.std() > 0.05
    if ids_Q is not None:
        best_L = found_LV.nan_to_num(nan=-torch.inf).argmax(-1)
        assert torch.equal(best_L, ids_Q[own_LQ.argmax(-1)])


@pytest.mark.parametrize("trait", others_long(TARGETS, ("scaled embeddings in a module", "biases")))
@pytest.mark.parametrize("reduced", [False, True])
def test_transformers_reads_a_draft_model_of_each_target_as_it_was(trait: str, reduced: bool, tmp_path: Path) -> None:
    target = target_of(trait)
    drafter = randomised(DraftLM.create(DraftLMConfig(layers=(0, 3), **REDUCED if reduced else {}), target,
                                        IDS if reduced else None))
    folder = written(drafter, target, "huggingface", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    features, own_LQ = drafted(drafter, target)
    with torch.no_grad():
        found_LV = model(features.tokens_BL).logits[0, :-1]
    ids_Q = drafter.token_ids_Q
    torch.testing.assert_close(found_LV if ids_Q is None else found_LV[:, ids_Q], own_LQ, atol=1e-4, rtol=1e-4)
    if ids_Q is not None:
        assert torch.equal(found_LV.argmax(-1), ids_Q[own_LQ.argmax(-1)])


@pytest.mark.parametrize(("trait", "make", "says"), [
    ("wide heads", lambda target: Hydra.create(HydraConfig(num_heads=2, prefix=True), target), NARROW["wide heads"]),
    ("wide heads", lambda target: Kangaroo.create(KangarooConfig(), target), NARROW["wide heads"]),
    ("biases", lambda target: Kangaroo.create(KangarooConfig(), target), BIAS["biases"]),
])
def test_official_code_that_cannot_hold_a_trait_is_named(
    trait: str, make: Callable[[Target], Drafter], says: str, tmp_path: Path
) -> None:
    target = target_of(trait)
    drafter = make(target)
    with pytest.raises(UserError, match=says):
        written(drafter, target, drafter.family, tmp_path / "out")
