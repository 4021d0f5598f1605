"""Adapters: merged, unmerged and peft's own forward agree; the original target notices nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.modules import Adapter, DecodeSettings, Features, Request, Target, UserError, decode
from draftsmith.modules.target.adapter import LowRank, choose_layers
from draftsmith.modules.target.loading.model_parts import hash_weights
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.trainers import medusa2
from draftsmith.trainers.medusa2 import LearningTarget, LoraConfig
from support.targets import random_adapter, tied_target

TOKENS = torch.tensor([[5, 9, 30, 31, 60, 7, 8, 44]])
HEAD = ("q_proj", "down_proj", "lm_head")


def logits(target: Target) -> torch.Tensor:
    with target.native() as model, torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


@pytest.mark.parametrize("make", [lambda: Target(tiny_model(), tiny_tokenizer(), name="tiny-random"), tied_target])
@pytest.mark.parametrize("modules", [(), HEAD])
def test_merged_equals_unmerged_equals_pefts_own_forward(make: Callable[[], Target], modules: tuple[str, ...],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    target = make()
    original, before = logits(target), hash_weights(target.model)
    adapter = random_adapter(target, modules)
    merged = target.adapted(adapter)
    if not modules:
        # Training changes all layers but the output layer.
        monkeypatch.setattr(medusa2, "ALPHA", 2.1)
        learning = LearningTarget(target, LoraConfig(rank=3))
        learning.load(adapter)
        learning.eval()
        torch.testing.assert_close(logits(merged), logits(learning.target), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(merged), by_peft(make(), adapter), atol=1e-5, rtol=1e-5)
    assert float((logits(merged) - original).abs().max()) > 0.1, "the adapter changes something"
    assert torch.equal(logits(target), original)
    assert hash_weights(target.model) == before


def by_peft(target: Target, adapter: Adapter) -> torch.Tensor:
    """The whole model wrapped by peft, as its users do it."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    with target.native() as model:
        wrapped: Any = get_peft_model(model, PeftConfig(r=3, lora_alpha=2.1, lora_dropout=0.0,
                                                        target_modules=list(adapter.layers)))
        for name, change in adapter.layers.items():
            layer = wrapped.base_model.model.get_submodule(name)
            layer.lora_A["default"].weight.data.copy_(change.a_RI)
            layer.lora_B["default"].weight.data.copy_(change.b_OR)
        with torch.no_grad():
            found: torch.Tensor = wrapped.eval()(TOKENS).logits
    return found


def test_the_passes_of_both_targets_can_be_mixed(tiny_target: Target) -> None:
    """Greedy decoding by each, one after the other and again, as if the other were not there."""
    adapted = tiny_target.adapted(random_adapter(tiny_target))
    requests = [Request((5, 9, 30), 0, 20)]
    answers = [decode(target, requests, DecodeSettings()).generations[0].tokens
               for target in (tiny_target, adapted, tiny_target, adapted)]
    assert answers[0] == answers[2] != answers[1] == answers[3]
    for target, answer in zip((tiny_target, adapted), answers, strict=False):
        with target.native() as model:
            reference = model.generate(torch.tensor([[5, 9, 30]]), max_new_tokens=20, do_sample=False)
        assert reference[0, 3:].tolist() == answer


def test_everything_but_the_adapted_layers_is_shared(tiny_target: Target) -> None:
    adapted = tiny_target.adapted(random_adapter(tiny_target, ("q_proj", "up_proj")))
    own, theirs = dict(adapted.model.named_parameters()), dict(tiny_target.model.named_parameters())
    assert own.keys() == theirs.keys()
    changed = {name for name in own if own[name] is not theirs[name]}
    assert changed == {name for name in own if "q_proj" in name or "up_proj" in name}
    assert adapted.identity.weights_hash != tiny_target.identity.weights_hash
    forms, changed_forms = tiny_target.linears.packed, adapted.linears.packed
    if forms is not None and changed_forms is not None:
        known = {id(form) for form in forms.layers.values()}
        assert sum(id(form) not in known for form in changed_forms.layers.values()) == len(changed)


def test_an_adapted_output_layer_leaves_the_embedding_alone() -> None:
    target = tied_target()
    adapted = target.adapted(random_adapter(target, ("lm_head",)))
    assert adapted.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight
    assert adapted.output_weight().data_ptr() != target.output_weight().data_ptr()
    assert not adapted.model.config.tie_word_embeddings
    assert target.model.config.tie_word_embeddings


def test_it_comes_back_from_its_description_and_tensors(tiny_target: Target) -> None:
    adapter = random_adapter(tiny_target)
    back = Adapter.rebuild(adapter.describe(), adapter.tensors())
    assert torch.equal(logits(tiny_target.adapted(back)), logits(tiny_target.adapted(adapter)))
    tensors = adapter.tensors()
    tensors.popitem()
    with pytest.raises(UserError, match=r"do not agree about adapter\.model\.layers\.\d"):
        Adapter.rebuild(adapter.describe(), tensors)


def test_half_precision_merges_in_float32() -> None:
    target = Target(tiny_model(dtype=torch.bfloat16), tiny_tokenizer(), name="tiny-random")
    adapter = random_adapter(target, ("q_proj",))
    merged = target.adapted(adapter).model.model.layers[0].self_attn.q_proj.weight
    change = adapter.layers["model.layers.0.self_attn.q_proj"]
    exact = target.model.model.layers[0].self_attn.q_proj.weight.float() + 0.7 * change.b_OR @ change.a_RI
    assert torch.equal(merged, exact.bfloat16())


def test_layers_that_the_target_lacks_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match=r"no linear layer 'c_attn'; it has q_proj, k_proj, v_proj, o_proj, gate_proj, "
                                        r"up_proj, down_proj, lm_head: name some of these"):
        choose_layers(tiny_target.model, ("q_proj", "c_attn"), without=tiny_target.head)
    other = Adapter({"model.layers.9.self_attn.q_proj": LowRank(a_RI=torch.zeros(2, 32), b_OR=torch.zeros(32, 2))}, 1.0)
    with pytest.raises(UserError, match=r"layers\.9\.self_attn\.q_proj of shape \(32, 32\), .* not at all; use the"):
        tiny_target.adapted(other)
    wide = Adapter({"model.layers.0.self_attn.q_proj": LowRank(a_RI=torch.zeros(2, 16), b_OR=torch.zeros(32, 2))}, 1.0)
    with pytest.raises(UserError, match=r"of shape \(32, 16\), which this target has in shape \(32, 32\)"):
        tiny_target.adapted(wide)


def test_impossible_adapters_are_refused() -> None:
    with pytest.raises(UserError, match="rank must be at least 1, got 0"):
        LoraConfig(rank=0)


def test_only_the_low_rank_weights_learn(tiny_target: Target) -> None:
    learning = LearningTarget(tiny_target, LoraConfig(rank=2))
    features = Features.from_rows([(TOKENS[0].tolist(), [True] * TOKENS.shape[1])])
    traced, plain = learning.target.trace(features).final(), tiny_target.encode(features).final()
    torch.testing.assert_close(traced, plain, atol=1e-5, rtol=1e-5)
    traced.square().sum().backward()
    assert {name.split(".")[0] for name, _ in learning.named_parameters()} == {"a", "b"}
    assert all(parameter.grad is not None for parameter in learning.parameters())
    assert all(parameter.grad is None for parameter in tiny_target.model.parameters())
    learners = {id(parameter) for parameter in learning.parameters()}
    assert all(id(parameter) in learners or not parameter.requires_grad
               for parameter in learning.target.model.parameters())
    assert len(learning.state_dict()) == 2 * len(learning.names)


def test_dropout_is_on_while_training_only(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medusa2, "DROPOUT", 0.5)
    learning = LearningTarget(tiny_target, LoraConfig(rank=2))
    learning.load(random_adapter(tiny_target, rank=2))
    features = Features.from_rows([(TOKENS[0].tolist(), [True] * TOKENS.shape[1])])
    one, two = (learning.train().target.trace(features).final() for _ in range(2))
    assert not torch.equal(one, two)
    one, two = (learning.eval().target.trace(features).final() for _ in range(2))
    assert torch.equal(one, two)
