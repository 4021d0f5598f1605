"""The choice of an optimizer: which weights have Muon, and several optimizers as one."""

import copy

import pytest
import torch
from draftsmith.modules import Target, UserError
from draftsmith.trainers.drafters.medusa2 import Medusa2TrainConfig
from draftsmith.trainers.steps.optimizers import MUON_RATE, Together, optimizer_for
from support.families import CASES
from torch.optim import AdamW, Muon


def made(target: Target, family: str = "eagle3", name: str = "muon") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    drafter = CASES[family].make(target)
    return drafter, optimizer_for(drafter, name, lr=1e-3, weight_decay=0.1)  # type: ignore[arg-type]


def names(drafter: torch.nn.Module, part: torch.optim.Optimizer) -> set[str]:
    held = {id(weight) for group in part.param_groups for weight in group["params"]}
    return {name for name, weight in drafter.named_parameters() if id(weight) in held}


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(tiny_target: Target) -> None:
    drafter, together = made(tiny_target)
    assert isinstance(together, Together)
    adamw, muon = together.parts
    assert isinstance(adamw, AdamW)
    assert isinstance(muon, Muon)
    layers = {f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    layers |= {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names(drafter, muon) == {"fc.weight", *layers}
    assert names(drafter, adamw) == {name for name, _ in drafter.named_parameters()} - names(drafter, muon)
    assert "lm_head.weight" in names(drafter, adamw)
    assert muon.param_groups[0]["lr"] == MUON_RATE * 1e-3
    decays = {name: group["weight_decay"] for group in adamw.param_groups for name in names(drafter, _alone(group))}
    assert (decays["norm.weight"], decays["lm_head.weight"]) == (0.0, 0.1)


def _alone(group: dict[str, object]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": group["params"]}], lr=1.0)


def test_without_muon_there_is_one_adamw(tiny_target: Target) -> None:
    _, optimizer = made(tiny_target, name="adamw")
    assert isinstance(optimizer, AdamW)
    assert optimizer.defaults["betas"] == (0.9, 0.999)


def test_own_embeddings_have_adamw(tiny_target: Target) -> None:
    drafter, together = made(tiny_target, "eagle3-narrow")
    assert isinstance(together, Together)
    assert "embed_tokens.weight" in names(drafter, together.parts[0])


def step(drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for weight in drafter.parameters():
        weight.grad = torch.randn(weight.shape, generator=draws)
    optimizer.step()


def test_a_resumed_optimizer_goes_on_as_if_it_had_not_stopped(tiny_target: Target) -> None:
    drafter, optimizer = made(tiny_target)
    step(drafter, optimizer, 1)
    kept, other = copy.deepcopy(optimizer.state_dict()), CASES["eagle3"].make(tiny_target)
    other.load_state_dict(drafter.state_dict())
    step(drafter, optimizer, 2)
    resumed = optimizer_for(other, "muon", lr=5.0, weight_decay=0.0)
    resumed.load_state_dict(kept)
    step(other, resumed, 2)
    for (name, weight), found in zip(drafter.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, found), name


def test_a_scheduler_sets_the_rates_of_all_parts(tiny_target: Target) -> None:
    _, together = made(tiny_target)
    assert isinstance(together, Together)
    scheduler = torch.optim.lr_scheduler.LambdaLR(together, lambda done: 1 / (1 + done))
    together.load_state_dict(copy.deepcopy(together.state_dict()))
    together.step()
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in together.parts] == pytest.approx([0.5e-3, 0.5e-2])


def test_medusa_2_has_rates_of_its_own() -> None:
    with pytest.raises(UserError, match=r"optimizer is 'muon', but the target's low-rank weights .*; set optimizer to"):
        Medusa2TrainConfig(optimizer="muon")
