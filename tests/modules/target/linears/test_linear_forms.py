"""Forms of a target's linear layers: measured or set by the user, and fixed where bytes must come out the same."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, WantedStates, distill
from draftsmith.modules import DecodeSettings, Request, StaticTree, Target, TokenTree, Topology, UserError, decode
from draftsmith.modules.target import linear_forms
from draftsmith.modules.target.linear_forms import TOKENS, LinearTimes, Packing, has_packed_product
from draftsmith.modules.target.loading.loading import TargetConfig, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.data.data_folders import contents, encode, many, write_prompts
from support.families import CASES, randomised
from support.processes import Killed, killed_after
from support.tiers import some_long

pytestmark = pytest.mark.skipif(not has_packed_product(torch.float32), reason="this build has no packed product")

PLAIN_PAYS = LinearTimes(dtype="float32", tokens=TOKENS, plain=(1.0,) * 6, packed=(2.0,) * 6)
BOTH_PAY = LinearTimes(dtype="float32", tokens=TOKENS, plain=(1.0, 1.0, 3.0, 3.0, 3.0, 3.0), packed=(2.0,) * 6)
PACKED_PAYS = LinearTimes(dtype="float32", tokens=TOKENS, plain=(2.0,) * 6, packed=(1.0,) * 6)


def measured(monkeypatch: pytest.MonkeyPatch, times: LinearTimes) -> Target:
    """A target of which these times are measured at load."""
    monkeypatch.setattr(linear_forms, "worth_measuring", lambda _model: True)
    monkeypatch.setattr(linear_forms, "measure_linears", lambda _model, dtypes: dict.fromkeys(dtypes, times))
    return Target(tiny_model(), tiny_tokenizer(), name="tiny-random", pack="auto")


@contextmanager
def packed_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of each product inside the block, of layers that are packed there."""
    found: list[int] = []
    original = linear_forms._packed_forward

    def watched(x: torch.Tensor, **given: Any) -> torch.Tensor:
        found.append(x.numel() // x.shape[-1])
        return original(x, **given)

    with monkeypatch.context() as patch:
        patch.setattr(linear_forms, "_packed_forward", watched)
        yield found


def pass_of(target: Target, tokens: int) -> None:
    target.start(1, 32).run(TokenTree.prompts(torch.arange(tokens)[None] + 5, torch.tensor([tokens])))


@pytest.mark.parametrize(("times", "packed_from", "rows"),
                         [(PLAIN_PAYS, 0, set()), (BOTH_PAY, 4, {4, 9}), (PACKED_PAYS, 1, {1, 2, 3, 4, 9})])
def test_a_pass_runs_the_form_that_was_measured(times: LinearTimes, packed_from: int, rows: set[int],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with packed_rows(monkeypatch) as seen:
        target = measured(monkeypatch, times)
        assert target.linears.packing == Packing(packed_from=packed_from, times=times)
        assert (target.linears.packed is None) == (packed_from == 0)
        seen.clear()
        for tokens in (1, 2, 3, 4, 9):
            pass_of(target, tokens)
    assert set(seen) == rows


def set_apart(targets: list[Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make packed products differ from plain ones by far more than rounding: every byte then shows which form ran."""
    original = linear_forms._packed_forward
    monkeypatch.setattr(linear_forms, "_packed_forward", lambda x, **given: original(x, **given) + 0.3)
    for target in targets:
        packing = target.linears.packing
        target.linears.use(Packing(packed_from=0))
        target.linears.use(packing)


def made(targets: list[Target], folder: Path) -> dict[str, bytes]:
    """Files of data with stored states, of which each target does a part: the first ones are killed."""
    prompts = write_prompts(folder, many(12))
    config = DistillConfig(shard_prompts=4, slots=3, max_new_tokens=8, temperatures=(0.0, 1.0), validation_prompts=2,
                           test_prompts=1)
    for target, writes in zip(targets, [9] * (len(targets) - 1) + [None], strict=True):
        # Six files a shard: its tokens, two of states and their list, the manifest, the times.
        with suppress(Killed), killed_after(writes):
            distill(target, prompts, config, ChatTemplate(target.tokenizer), folder / "data", progress=False,
                    states=[WantedStates(taps=(0,))])
    # Layer 1 by a second pass.
    encode(targets[-1], folder / "data", (0, 1))
    return contents(folder / "data")


@pytest.mark.long
def test_a_run_measured_anew_after_a_kill_ends_in_the_same_bytes(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    forced = load_target(TargetConfig(name="tiny-random", pack=1))
    targets = [measured(monkeypatch, times) for times in (PLAIN_PAYS, BOTH_PAY, PACKED_PAYS)]
    set_apart([forced, *targets], monkeypatch)
    expected = made([forced], tmp_path / "forced")
    assert len(expected) > 6
    for number, order in enumerate(itertools.permutations(targets)):
        assert made(list(order), tmp_path / f"measured-{number}") == expected
    assert [target.linears.packing.packed_from for target in targets] == [0, 4, 1]
    # The bytes do depend on the form: without the block they would differ.
    monkeypatch.setattr(Target, "reproducible", lambda _self: nullcontext())
    assert made(targets[:1], tmp_path / "unprotected") != expected


def test_a_form_that_the_user_has_set_stays_in_reproducible_work(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model(), tiny_tokenizer(), name="tiny-random", pack=4)
    with target.reproducible():
        assert target.linears.packing == Packing(packed_from=4)
    target = measured(monkeypatch, BOTH_PAY)
    with target.reproducible():
        assert target.linears.packing == Packing(packed_from=1, times=BOTH_PAY)
    assert target.linears.packing.packed_from == 4


@pytest.mark.parametrize("times", [PLAIN_PAYS, BOTH_PAY, PACKED_PAYS])
@pytest.mark.parametrize("family", some_long(["eagle", "medusa-copy", "draft-lm"], 9))
def test_drafted_answers_are_the_plain_ones_in_every_form(family: str, times: LinearTimes,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    target = measured(monkeypatch, times)
    requests = [Request((5, 9, 11 + row), row, 24) for row in range(3)]
    plain = decode(target, requests, DecodeSettings()).generations
    drafter = randomised(CASES[family].make(target))
    for topology in (Topology.chain(1), Topology((-1, 0, 0, 1, 1), (0, 0, 1, 0, 1))):
        drafted = decode(target, requests, DecodeSettings(batch_size=2), drafter=drafter, policy=StaticTree(topology))
        assert [one.tokens for one in drafted.generations] == [one.tokens for one in plain]
    assert (drafter.packing._layers is None) == (target.linears.packing.packed_from == 0)


def test_drafts_follow_the_target_into_its_reproducible_form(monkeypatch: pytest.MonkeyPatch) -> None:
    target = measured(monkeypatch, PLAIN_PAYS)
    for family in ("eagle", "draft-lm"):
        drafter = randomised(CASES[family].make(target))
        drafter.start(1, 32)
        assert drafter.packing._layers is None
        with target.reproducible():
            drafter.start(1, 32)
            assert drafter.packing._layers is not None
        drafter.start(1, 32)
        assert drafter.packing._layers is None


def test_small_targets_and_other_formats_have_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "measure_linears", None)
    assert load_target(TargetConfig(name="tiny-random")).linears.packing == Packing(packed_from=1)
    double = load_target(TargetConfig(name="tiny-random", dtype="float64"))
    assert double.linears.packing == Packing(packed_from=0)


def test_the_forms_are_said_in_words() -> None:
    assert Packing(packed_from=0).in_words == "linear layers plain"
    assert Packing(packed_from=1, times=PACKED_PAYS).in_words == (
        "linear layers packed for oneDNN, which was measured to be fastest here")
    assert "in passes of 4 tokens or more, plain in smaller ones" in Packing(packed_from=4).in_words


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"target\.pack must be auto or at least 0, got -1; 1 packs"):
        load_target(TargetConfig(name="tiny-random", pack=-1))
