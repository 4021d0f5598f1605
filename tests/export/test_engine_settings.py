"""Numbers of tokens that engines should draft: the best of all by hand and by search, and the engines' forms."""

import json
import random
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith.export import Artifact, ExportSettings, Tuning, export_artifact
from draftsmith.export.engine_settings import (
    DraftSettings,
    best_tokens,
    chain_costs,
    chain_lengths,
    draft_settings,
    ranges_of,
    scheduling,
)
from draftsmith.export.layouts.parts.export_format import Places
from draftsmith.export.layouts.registry import format_named
from draftsmith.modules import CostTable, Target, Topology, UserError
from draftsmith.modules.tuning.step_timing import CostCurve
from draftsmith.modules.tuning.trials import Counted, Trial
from support.targets import six_layers

from .layouts.test_engine_contracts import MADE, target_of


def rates(*chances: float) -> dict[str, Any]:
    """acceptance.json of a draft whose tokens are accepted up to each with these chances."""
    return {"vllm": [{"num_speculative_tokens": len(chances), "synthetic_acceptance_rates": [*chances]}]}


def table(passes: dict[int, list[float]], step: float = 0.0) -> CostTable:
    """Seconds of passes of 1, 2, ... tokens by requests, and of a step of the draft."""
    return CostTable(curves=tuple(CostCurve(
        batch=batch, sizes=tuple(range(1, 1 + len(seconds))), pass_seconds=tuple(seconds),
        draft_seconds=tuple(step * k for k in range(len(seconds)))) for batch, seconds in passes.items()))


def test_the_best_number_is_that_of_a_search_through_all() -> None:
    dice = random.Random(0)
    for _ in range(200):
        chances = sorted((dice.random() for _ in range(dice.randint(1, 8))), reverse=True)
        cost = table({2: sorted(dice.uniform(1, 3) for _ in range(9))}, dice.uniform(0, 0.3))
        [curve] = cost.curves
        speeds = [(1 + sum(chances[:k])) / (curve.pass_seconds[k] + curve.draft_seconds[k])
                  for k in range(1 + len(chances))]
        lengths = {k: 1 + sum(chances[:k]) for k in range(1, 1 + len(chances))}
        assert best_tokens(lengths, cost, 2) == speeds.index(max(speeds))


@pytest.mark.parametrize(("lengths", "passes", "step", "best"), [
    ({1: 1.5, 2: 1.75}, [1.0, 1.0, 1.0], 0.0, 2),  # A pass of more tokens is free
    ({1: 1.5, 2: 1.75}, [1.0, 1.2, 1.5], 0.0, 1),  # 1.5 / 1.2 against 1.75 / 1.5
    ({1: 1.5, 2: 1.75}, [1.0, 1.2, 1.5], 0.3, 0),  # A tie is none: 1.5 tokens in 1.5 seconds
    ({1: 1.0, 2: 1.0}, [1.0, 1.0, 1.0], 0.0, 0),  # Nothing is ever accepted
    ({1: 1.9, 8: 9.0}, [1.0, 1.0], 0.0, 1),  # Nobody has timed passes of nearly nine tokens
])
def test_the_best_number_by_hand(lengths: dict[int, float], passes: list[float], step: float, best: int) -> None:
    assert best_tokens(lengths, table({1: passes}, step)) == best


def test_lengths_are_those_of_the_chain_or_of_the_start_of_a_longer_one(target: Target) -> None:
    found = rates(0.5, 0.25, 0.1, 0.05)
    found["vllm"].insert(0, {"num_speculative_tokens": 1, "synthetic_acceptance_rates": [0.6]})
    assert chain_lengths(found, MADE["eagle3"](target)) == {1: 1.6, 2: 1.75, 3: 1.85, 4: 1.9}
    assert list(chain_lengths(found, MADE["medusa"](target))) == [1, 2, 3], "it has three heads"
    block = MADE["block"](target)
    assert chain_lengths(rates(*[0.5] * 6), block).keys() == {block.reach}, "a shorter block is another one"
    assert chain_lengths({}, block) == {}
    with pytest.raises(UserError, match=r"acceptance.json is damaged: 'synthetic_acceptance_rates'; delete it, or"):
        chain_lengths({"vllm": [{"num_speculative_tokens": 1}]}, block)


@pytest.fixture(scope="module")
def target() -> Target:
    return six_layers()


TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))


@pytest.fixture
def artifact(target: Target) -> Artifact:
    return Artifact(drafter=MADE["eagle3"](target), target=target, topology=TREE, identity=target.identity,
                    provenance={}, acceptance=rates(0.8, 0.5, 0.2))


COSTS = table({1: [1.0, 1.0, 1.1, 1.4], 4: [1.0, 1.3, 1.8, 2.4], 16: [1.0, 1.9, 2.8, 3.6]}, 0.05)


def test_every_engine_gets_its_own_form(artifact: Artifact, tmp_path: Path) -> None:
    found = draft_settings(artifact, COSTS)
    # 1.8 / 1.05, 2.3 / 1.2, 2.5 / 1.55; then 1.8 / 1.35, 2.3 / 1.9, 2.5 / 2.55; then less than one.
    assert found.ranges == ((1, 1, 2), (2, 4, 1), (5, 16, 0))
    assert found.vllm(3) == {"num_speculative_tokens": 2,
                             "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 4, 1], [5, 16, 0]]}
    assert found.sglang(3, 1, 4) == {"num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3}
    assert found.tensorrt(3) == "max_draft_len: 2, draft_len_schedule: {1: 2, 4: 1, 16: 0}"
    # Each further token of a pass takes 0.05, in which 0.1 are emitted at 2.3 / 1.2.
    assert found.least == 0.1
    assert ("seconds of your engine. By requests at once: 2 for 1, 1 for 2 to 4, none for 5 to 16. For one request the "
            "speed is predicted at 1.92 of that without drafts.") in found.said
    said = (export_artifact(artifact, artifact.target, "eagle", tmp_path / "out", ExportSettings(drafts=found))
            / "README.md").read_text()
    for part in (found.said, json.dumps(found.vllm(3))[1:-1], found.tensorrt(3),
                 "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"):
        assert part in said
    command = format_named("gguf").commands(artifact.drafter, Places(drafts=found))["llama.cpp"]
    assert "--spec-draft-n-max 2 --spec-draft-p-min 0.1" in command
    on_hub = Places(target="owner/name", on_hub=True, drafts=found)
    assert "--speculative-config" in shlex.split(format_named("speculators").commands(artifact.drafter, on_hub)["vLLM"])


def test_a_draft_that_never_pays_is_off(artifact: Artifact) -> None:
    found = draft_settings(replace(artifact, acceptance=rates(0.0, 0.0)), COSTS)
    assert (found.tokens, found.ranges, found.least, found.tree) == (0, ((1, 16, 0),), None, None)
    assert found.said.endswith("By requests at once: none for 1 to 16. Serve the target alone where it says none.")
    assert found.vllm(3) == {"num_speculative_tokens": 3}, "the folder's commands stay whole for other machines"


@pytest.mark.parametrize(("length", "grown"), [(1.9, None), (3.0, TREE)])
def test_a_tree_where_it_was_measured_and_wins(artifact: Artifact, length: float, grown: Topology | None) -> None:
    tried = Trial(policy="static-4", chosen=Counted(accepted_length=length, nodes=4.0))
    found = draft_settings(replace(artifact, tuning=Tuning.of(artifact.target, COSTS, (tried,))), COSTS)
    assert found.tree == grown
    assert found.sglang(3, 4, 16) == ({"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 4} if grown else
                                      {"num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 3})
    # 3 tokens in a pass of 4 and two steps, which take 1.4 and 0.1.
    assert ("SGLang's tree of 4 tokens is predicted at 2.00" in found.said) is (grown is not None)


def test_seconds_of_trees_become_those_of_chains(artifact: Artifact) -> None:
    """The tree's 3 first nodes have one level, all 4 two: a chain of 3 tokens takes another step."""
    timed = table({1: [1.0, 1.1, 1.2, 1.3]})
    timed = replace(timed, curves=(replace(timed.curves[0], draft_seconds=(0.0, 0.2, 0.21, 0.35)),))
    [curve] = chain_costs(timed, artifact.drafter, TREE).curves
    assert curve.draft_seconds == pytest.approx((0.0, 0.2, 0.35, 0.5))
    assert chain_costs(timed, MADE["medusa"](artifact.target), TREE) is timed, "heads answer in one pass"


def test_without_figures_the_numbers_are_defaults_and_say_so(artifact: Artifact) -> None:
    for found, why in ((draft_settings(artifact), "no seconds were measured, give your engine's with --engine_costs"),
                       (draft_settings(replace(artifact, acceptance={}), COSTS), "no acceptance of such chains")):
        assert found.ranges == ()
        assert found.said.startswith(f"The numbers of tokens to draft are defaults: {why}")
    assert DraftSettings().sglang(3, 4, 16) == {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16}
    assert DraftSettings().tensorrt(4) == "max_draft_len: 4"


def test_equal_neighbours_are_one_range() -> None:
    assert ranges_of({1: 3, 2: 3, 8: 1, 16: 1, 32: 0}) == ((1, 2, 3), (3, 16, 1), (17, 32, 0))


def test_confidence_is_scheduled_by_two_files(target: Target, tmp_path: Path) -> None:
    """TensorRT-LLM adds the milliseconds of all tokens and of the requests, each between its neighbours."""
    target = target_of("block dspark", target)
    drafter = MADE["block dspark"](target)
    drafter.judge_temperatures_K.copy_(1 + 0.5 * drafter.judge_temperatures_K.cumsum(0))
    artifact = Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={})
    costs = table({batch: [1 + 0.1 * batch * size + 0.01 * batch ** 2 for size in range(1, 6)]
                   for batch in (1, 2, 8)}, 0.1)
    folder = export_artifact(artifact, target, "dflash", tmp_path / "out",
                             ExportSettings(drafts=draft_settings(artifact, costs)))
    held = json.loads((folder / "confidence_calibration.json").read_text())
    assert held["sts_temperatures"] == held["temperatures"] == drafter.judge_temperatures_K.tolist()
    found = json.loads((folder / "confidence_cost_table.json").read_text())
    assert found == scheduling(costs, drafter.config.num_steps)
    for curve in costs.curves:
        drafting = costs.draft_seconds(1 + drafter.config.num_steps, curve.batch)
        for size, seconds in zip(curve.sizes, curve.pass_seconds, strict=True):
            step = (np.interp(curve.batch * size, found["token_counts"], found["step_time_ms"])
                    + np.interp(curve.batch, found["batch_sizes"], found["batch_overhead_ms"]))
            assert step == pytest.approx(1e3 * (seconds + drafting), rel=1e-6)
    note = (folder / "README.md").read_text()
    assert "confidence_cost_table_path: FOLDER/confidence_cost_table.json" in note
    folder = export_artifact(artifact, target, "dflash", tmp_path / "out")
    assert not (folder / "confidence_cost_table.json").exists()
    assert "verifies whole blocks without a table of costs" in (folder / "README.md").read_text()
