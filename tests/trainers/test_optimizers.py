"""The choice of an optimizer: which weights have Muon, and several optimizers as one; the schedule of its rate."""

import copy
import math
from typing import Any

import pytest
import torch
from draftsmith.modules import Target
from draftsmith.modules.processes import Processes
from draftsmith.trainers import optimizers
from draftsmith.trainers.optimizers import (
    BETAS,
    MUON_RATE,
    Muon,
    optimizer_for,
    products_for,
    time_leads,
    warmup_cosine,
)
from references.muon import plain_muon
from support.families import CASES
from torch.optim import AdamW


def made(target: Target, family: str = "eagle3", name: str = "muon") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    drafter = CASES[family].make(target)
    return drafter, optimizer_for(drafter, name, lr=1e-3, weight_decay=0.1)  # type: ignore[arg-type]


def names(drafter: torch.nn.Module, *groups: dict[str, Any]) -> set[str]:
    held = {id(weight) for group in groups for weight in group["params"]}
    return {name for name, weight in drafter.named_parameters() if id(weight) in held}


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(tiny_target: Target) -> None:
    drafter, optimizer = made(tiny_target)
    assert isinstance(optimizer, Muon)
    *adamw, muon = optimizer.param_groups
    assert "products" in muon
    assert not any("products" in group for group in adamw)
    layers = {f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"}
    layers |= {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names(drafter, muon) == {"fc.weight", *layers}
    assert names(drafter, *adamw) == {name for name, _ in drafter.named_parameters()} - names(drafter, muon)
    assert "lm_head.weight" in names(drafter, *adamw)
    assert muon["lr"] == MUON_RATE * 1e-3
    decays = {name: group["weight_decay"] for group in adamw for name in names(drafter, group)}
    assert (decays["norm.weight"], decays["lm_head.weight"]) == (0.0, 0.1)


def test_without_muon_there_is_one_adamw(tiny_target: Target) -> None:
    _, optimizer = made(tiny_target, name="adamw")
    assert type(optimizer) is AdamW
    assert optimizer.defaults["betas"] == (0.9, 0.999)


def test_own_embeddings_have_adamw(tiny_target: Target) -> None:
    drafter, optimizer = made(tiny_target, "eagle3-narrow")
    assert "embed_tokens.weight" in names(drafter, *optimizer.param_groups[:-1])


def step(drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for weight in drafter.parameters():
        weight.grad = torch.randn(weight.shape, generator=draws)
    optimizer.step()


@pytest.mark.parametrize(("first", "then"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_resumed_optimizer_goes_on_as_if_it_had_not_stopped(first: str, then: str, tiny_target: Target,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a processor on which another number format is faster."""
    monkeypatch.setattr(optimizers, "measured_products", lambda: first)
    drafter, optimizer = made(tiny_target)
    step(drafter, optimizer, 1)
    kept, other = copy.deepcopy(optimizer.state_dict()), CASES["eagle3"].make(tiny_target)
    other.load_state_dict(drafter.state_dict())
    step(drafter, optimizer, 2)
    monkeypatch.setattr(optimizers, "measured_products", lambda: then)
    resumed = optimizer_for(other, "muon", lr=5.0, weight_decay=0.0)
    resumed.load_state_dict(kept)
    step(other, resumed, 2)
    for (name, weight), found in zip(drafter.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, found), name


def stepped(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], steps: int = 3) -> None:
    for number in range(steps):
        for weight, gradient in zip(weights, gradients(weights, number), strict=True):
            weight.grad = gradient
        optimizer.step()


def gradients(weights: list[torch.nn.Parameter], number: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(number)
    return [torch.randn(weight.shape, generator=draws) for weight in weights]


def matrices() -> list[torch.nn.Parameter]:
    draws = torch.Generator().manual_seed(99)
    return [torch.nn.Parameter(torch.randn(shape, generator=draws)) for shape in ((24, 40), (40, 24), (32, 32))]


def alone(weights: list[torch.nn.Parameter], products: str) -> Muon:
    return Muon([{"params": weights, "products": products}], lr=0.1, weight_decay=0.2, betas=BETAS)


def test_muon_in_bfloat16_is_that_of_torch() -> None:
    ours, theirs = matrices(), matrices()
    stepped(alone(ours, "bfloat16"), ours)
    stepped(torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw"), theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_muon_in_float32_has_no_rounding_of_bfloat16() -> None:
    for products, close in (("float32", True), ("bfloat16", False)):
        found = matrices()
        stepped(alone(found, products), found)
        for place, (weight, start) in enumerate(zip(found, matrices(), strict=True)):
            given = [gradients(found, number)[place] for number in range(3)]
            wanted = plain_muon(start.detach(), given, 0.1, 0.2)
            assert torch.allclose(weight.detach().double(), wanted, rtol=1e-4, atol=1e-5) == close


@pytest.mark.parametrize(("bfloat16", "float32", "faster"), [
    ((90, 2, 50, 3), (9, 3, 4, 60), "bfloat16"), ((9, 12, 40, 30), (90, 2, 3, 2), "float32")])
def test_the_format_of_the_products_is_the_faster_one(bfloat16: tuple[int, ...], float32: tuple[int, ...], faster: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fastest of several times, some of which another program disturbs."""
    times = [time for pair in zip(bfloat16, float32, strict=True) for taken in pair for time in (0, taken)]
    monkeypatch.setattr(optimizers.time, "perf_counter", iter(times).__next__)
    optimizers.measured_products.cache_clear()
    assert products_for(torch.device("cpu")) == products_for(torch.device("cpu")) == faster
    assert products_for(torch.device("meta")) == "bfloat16", "it is not measured elsewhere"
    monkeypatch.setattr(Processes, "gather", lambda _self, _value: ["float32", "bfloat16"])
    assert products_for(torch.device("cpu")) == "float32", "that of the first process"
    optimizers.measured_products.cache_clear()


def test_a_scheduler_sets_the_rates_of_all_parts(tiny_target: Target) -> None:
    _, optimizer = made(tiny_target)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    scheduler.step()
    assert [optimizer.param_groups[place]["lr"] for place in (0, -1)] == pytest.approx([0.5e-3, 0.5e-2])


def test_warm_up_is_linear_and_starts_above_zero() -> None:
    factor = warmup_cosine(4, 20)
    assert [factor(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_the_cosine_is_half_way_down_in_the_middle_and_falls_towards_zero() -> None:
    factor = warmup_cosine(10, 110)
    assert factor(60) == pytest.approx(0.5)
    assert 0 < factor(109) < 0.001
    values = [factor(step) for step in range(10, 110)]
    assert values == sorted(values, reverse=True)
    linear = warmup_cosine(10, 110, lambda: 0.9, linear=True)
    assert [linear(step) for step in (4, 9, 35, 85)] == pytest.approx([0.05, 0.1, 0.1, 0.1]), "time is ahead"
    assert warmup_cosine(10, 110, linear=True)(85) == pytest.approx(0.25)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 5), (5, 5), (10, 5), (0, 1)])
def test_odd_lengths_stay_within_bounds(warmup: int, steps: int) -> None:
    values = [warmup_cosine(warmup, steps)(step) for step in range(steps + 2)]
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in values)
    assert values[0] > 0


def test_the_rate_follows_time_when_it_is_further_on_than_steps() -> None:
    spent = [0.0]
    factor = warmup_cosine(10, 110, lambda: spent[0])
    assert factor(35) == pytest.approx(warmup_cosine(10, 110)(35))
    spent[0] = 0.5
    assert factor(35) == pytest.approx(0.5)
    assert factor(85) == pytest.approx(warmup_cosine(10, 110)(85)), "the steps are further on"
    assert factor(4) == pytest.approx(0.25), "half risen, half fallen"
    spent[0] = 1.3
    assert factor(35) == factor(4) == 0.0


def test_a_run_that_its_steps_end_does_not_depend_on_the_clock() -> None:
    """The first steps are slow: their time is ahead of them, though the steps will end the run."""
    for step, spent in ((0, 0.04), (1, 0.05), (40, 0.3), (100, 0.9)):
        assert warmup_cosine(10, 110, lambda spent=spent: spent)(step) == warmup_cosine(10, 110)(step)
    assert time_leads(100, 10, 0.16)
    assert not time_leads(100, 10, 0.15)
    assert time_leads(None, 10, 0.0)
