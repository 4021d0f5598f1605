"""acceptance.json: its figures are those of decoding, and engines can take its fields as they stand."""

from pathlib import Path

import pytest
import torch
from draftsmith.export.evaluation.results import Answer
from draftsmith.export.measured_files import (
    Pass,
    acceptance_lines,
    chain_measurements,
    measurements,
    profile,
    read_acceptance,
    save_acceptance,
)
from draftsmith.modules import Request, Target, Topology, UserError, ranked_text
from support.answers import encoded_answers, replay
from support.families import CASES, randomised

FACTS = {"family": "medusa", "target": "a target", "weights_sha256": "5eed"}
DECODED = {"method": "medusa", "chain": False, "nodes": 4, "temperature": 0.7, "answers": 2,
           "source": "decoded answers"}


def test_rates_are_given_by_position_group_and_condition() -> None:
    passes = [Pass(3, 120, "code"), Pass(1, 123, "code"), Pass(2, 127, "chat"), Pass(1, 300)]
    whole, *rest = measurements(passes, DECODED, 3)
    assert whole["unconditional"] == [0.5, 0.25, 0.0]
    assert whole["conditional"] == [0.5, 0.5, 0.0]
    assert (whole["drafts"], whole["accepted_length"], whole["temperature"]) == (4, 1.75, 0.7)
    assert {(one["group"], one["value"]): one["drafts"] for one in rest} == {
        ("context_tokens", "0-127"): 3, ("context_tokens", "256-511"): 1, ("kind", "code"): 2, ("kind", "chat"): 1}
    assert next(one for one in rest if one["value"] == "256-511")["conditional"] == [0.0, None, None], "none got there"
    assert measurements([], DECODED, 3) == []


def test_a_pass_counts_at_the_length_of_the_text_before_it() -> None:
    answer = Answer(question=0, turn=1, prompt_set="own", category="code", tokens=(1,) * 7, emitted=(3, 1, 2),
                    truncated=False, comparison=None, prompt_tokens=20)
    assert answer.passes == [Pass(3, 21, "code"), Pass(1, 24, "code"), Pass(2, 25, "code")]


@pytest.mark.parametrize("family", ["medusa", "eagle"])
def test_chains_along_held_out_answers_accept_what_decoding_them_does(family: str, tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    torch.manual_seed(7)
    drafter = randomised(CASES[family].make(target).to(target.dtype))
    features = [target.encode(one, drafter.taps)
                for one in encoded_answers(target, [Request((5, 20 + at, 7), at, 25 + at) for at in range(7)])]
    found = [one for one in chain_measurements(ranked_text(drafter, features)) if one["group"] == "all"]
    assert [one["draft_tokens"] for one in found] == list(range(1, 1 + max(2, len(found))))
    for one in found[:3]:
        decoded = replay(drafter, target, features, Topology.chain(one["draft_tokens"]))
        assert one["drafts"] == decoded.passes
        assert one["unconditional"] == pytest.approx(decoded.by_position)
    assert found[0]["unconditional"][0] > 0.01, "nothing is accepted: the test would see nothing"


def test_engines_simulate_the_chain_that_was_decoded() -> None:
    chain = {**DECODED, "method": "chain-2", "chain": True, "nodes": 3, "temperature": 0.0}
    held_out = measurements([Pass(1, 9), Pass(1, 9)], {**chain, "source": "held-out answers"}, 2)
    decoded = measurements([Pass(3, 9), Pass(1, 9), Pass(2, 9)], chain, 2)
    found = profile(FACTS, [*held_out, *decoded, *measurements([Pass(2, 9)], DECODED, 1)])
    # As vLLM checks them: one rate a token, unconditional, from 0 to 1, none above the one before.
    assert found["vllm"] == [{"num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
                              "synthetic_acceptance_rates": [0.6667, 0.3333]}]
    assert found["llama_cpp"] == [["--spec-draft-n-max", "2", "--spec-synthetic-acceptance-rates", "0.6667,0.3333"]]
    assert profile(FACTS, held_out)["vllm"][0]["synthetic_acceptance_rates"] == [0.0, 0.0]


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    blank = profile(FACTS, [])
    assert (blank["family"], blank["measurements"], blank["vllm"]) == ("medusa", [], [])
    assert "nothing was decoded with this draft yet" in blank["note"]
    assert "nothing was decoded with this draft yet" in "".join(acceptance_lines(blank))
    held_out = measurements([Pass(2, 9)], {**DECODED, "source": "held-out answers"}, 1)
    save_acceptance(tmp_path, FACTS, held_out)
    save_acceptance(tmp_path, FACTS, measurements([Pass(1, 9)], DECODED, 1))
    kept = read_acceptance(tmp_path)
    assert {one["source"] for one in kept["measurements"]} == {"held-out answers", "decoded answers"}
    assert "note" not in kept
    # Those of other weights say nothing of these.
    save_acceptance(tmp_path, {**FACTS, "weights_sha256": "other"}, [])
    assert read_acceptance(tmp_path)["measurements"] == []
    (tmp_path / "acceptance.json").write_text("[]")
    with pytest.raises(UserError, match=r"acceptance\.json is damaged.*delete it"):
        read_acceptance(tmp_path)
