"""The benchmark of decoding: drafters accept exactly what is stated, all answers are those of the plain loop, and the
passes of last halves are those without set-up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import decode_speed
from benchmarks.decode_speed import Bench, Speed
from benchmarks.parts.shapes import RANKS, STRIDE, Oracle, shaped_prompt, shaped_target
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    Eagle3,
    Eagle3Config,
    Medusa,
    MedusaConfig,
    Request,
    StaticTree,
    Target,
    decode,
)
from draftsmith.modules.baselines.memories import recycling_tree
from draftsmith.modules.parts.block_cache import BlockRows
from draftsmith.modules.parts.decoder_block import AttentionContext

A = 0.6
ROWS, PROMPT, LENGTH = 3, 10, 60


@pytest.fixture(scope="module")
def target() -> Target:
    return shaped_target("tiny")


@pytest.fixture(scope="module")
def oracle(target: Target) -> Oracle:
    texts_ST = Bench("tiny", target, PROMPT, LENGTH, A).texts_ST(ROWS)
    drafter = Medusa.create(MedusaConfig(num_heads=3, vocabulary_size=128), target, torch.arange(128)).eval()
    return Oracle(drafter, texts_ST, target.vocab_size, A)


def emitted(target: Target, oracle: Oracle, policy: StaticTree) -> list[list[int]]:
    requests = [Request(shaped_prompt("tiny", row, PROMPT), row, LENGTH) for row in range(ROWS)]
    found = decode(target, requests, DecodeSettings(batch_size=ROWS, ignore_eos=True), drafter=oracle, policy=policy)
    for row, generation in enumerate(found.generations):
        assert generation.tokens == oracle.texts_ST[row, PROMPT:].tolist()
    return [generation.emitted for generation in found.generations]


def expected(ranks: list[int], widths: tuple[int, ...]) -> list[int]:
    """Tokens of each pass where the guess at depth d has the ranks below widths[d], by the ranks of the right ones."""
    lengths, place = [], PROMPT
    while place < PROMPT + LENGTH - 1:
        deeper = 0
        while deeper < len(widths) and ranks[min(place + 1 + deeper, len(ranks) - 1)] < widths[deeper]:
            deeper += 1
        lengths.append(min(deeper + 1, PROMPT + LENGTH - 1 - place))
        place += deeper + 1
    return lengths


def test_the_text_of_a_shape_is_known(target: Target) -> None:
    bench = Bench("tiny", target, PROMPT, LENGTH, A)
    texts_ST = bench.texts_ST(ROWS)
    assert torch.equal(texts_ST[:, 1:], (texts_ST[:, :-1] + STRIDE) % 128)
    assert decode_speed.own(target, LENGTH)(bench.prompts(ROWS)).answers == texts_ST[:, PROMPT:].tolist()


@pytest.mark.parametrize(("policy", "widths"), [
    (Chain(3), (1, 1, 1)),
    (StaticTree(decode_speed.Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])), (2, 2)),
])
def test_an_oracle_accepts_what_is_stated(target: Target, oracle: Oracle, policy: StaticTree,
                                          widths: tuple[int, ...]) -> None:
    assert emitted(target, oracle, policy) == [expected(row, widths) for row in oracle.ranks_ST.tolist()]


def test_the_ranks_of_an_oracle_are_geometric(target: Target, oracle: Oracle) -> None:
    drawn = Oracle(oracle.inner, torch.zeros(50, 400, dtype=torch.long), target.vocab_size, A).ranks_ST
    for rank in range(3):
        assert float((drawn == rank).double().mean()) == pytest.approx(A * (1 - A) ** rank, abs=0.01)
    assert int(drawn.max()) <= RANKS


def test_the_drafter_of_an_oracle_grows_a_new_tree_in_each_pass(target: Target, oracle: Oracle,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """It does the work that it does alone: a chain of three has two nodes with children below the root."""
    held, add_nodes = [], BlockRows.add_nodes

    def counted(rows: BlockRows, *args: Any) -> AttentionContext:
        context = add_nodes(rows, *args)
        held.append(rows.nodes_BM.shape[1])
        return context

    monkeypatch.setattr(BlockRows, "add_nodes", counted)
    eagle = Eagle3.create(Eagle3Config(), target, None).eval()
    passes = emitted(target, Oracle(eagle, oracle.texts_ST, target.vocab_size, A), Chain(3))
    assert held == [1, 2] * max(map(len, passes))


def test_an_oracle_keeps_the_places_of_rows(target: Target, oracle: Oracle) -> None:
    """Rows that end early leave, and the others move into their places."""
    requests = [Request(shaped_prompt("tiny", row, PROMPT), row, 10 + 20 * row) for row in range(ROWS)]
    found = decode(target, requests, DecodeSettings(batch_size=ROWS, ignore_eos=True), drafter=oracle, policy=Chain(3))
    assert found.accepted_length > 1.5


@pytest.mark.long
def test_the_table_has_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    decode_speed.main(["--shape", "tiny", "--new-tokens", "8", "--context", "8", "--batches", "1", "2",
                       "--recipes", "medusa", "eagle3"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    names = [row[0] for row in rows]
    assert {"plain loop", "generate, static cache", "first layers, chain", "medusa, tree", "eagle3, chain"} < set(names)
    assert names.count("eagle3, tree") == 2
    for row in rows:
        assert float(row[2]) > 0
        assert row[6] == f"{row[1]} of {row[1]}" or "sampled" in row[0]


def test_the_last_half_of_an_answer_has_no_set_up() -> None:
    """A prompt of four seconds, a slow first half, passes of a second and three tokens, and a last one that is cut."""
    passes = [(4.0, 1), (8.0, 4), (12.0, 5), (13.0, 3), (14.0, 3), (15.0, 3), (17.0, 1)]
    first, second = (decode_speed.Outcome([[7] * 20], 7, seconds, recorded=rounds, passes_at=passes)
                     for seconds, rounds in ((40.0, 3), (20.0, 0)))
    late = decode_speed.Late.measured("tree", [first, second], [[7] * 20])
    assert (late.seconds, late.tokens, late.calls, late.recorded) == (1.0, 3.0, (0.5, 1.0), (3, 0))
    assert decode_speed.late_table([late])[-1] == "| tree | 1000.00 | 3.00 | 3.0 | 0.5, 1.0 | 3, 0 | yes |"


def test_the_last_halves_are_told_one_by_one(target: Target) -> None:
    """With recurrent layers too, whose answers a shape determines as well."""
    bench = Bench("tiny-hybrid", shaped_target("tiny-hybrid"), PROMPT, 24, A)
    *told, rows = decode_speed.last_halves(bench, ["no graphs"], float("inf"))
    assert [[row.left_out for row in before] for before in told[:2]] == [
        ["no time was left"] * 3, ["did not end in time", *["no time was left"] * 2]]
    assert [(row.method, row.equal, row.left_out) for row in rows] == [
        (f"{kind}, no graphs", True, "") for kind in ("plain", "chain of 3", "tree of 32")]
    assert all(row.seconds > 0 for row in rows)
    assert 1 == rows[0].tokens < rows[1].tokens < rows[2].tokens
    *_, rows = decode_speed.last_halves(bench, ["graphs"], 0.0)
    assert decode_speed.late_table(rows)[-1] == "| tree of 32, graphs | no time was left | | | | | |"


def test_what_has_no_time_is_named(target: Target) -> None:
    speed = Bench("tiny", target, PROMPT, LENGTH, A).timed("generate", 1, decode_speed.peer(target, 4), deadline=0.0)
    lines = decode_speed.table([Speed("plain loop", 1, 10.0), speed])
    assert lines[-1] == "| generate | 1 | no time was left | | | | |"


def test_what_fails_is_named(target: Target) -> None:
    def fail(_prompts: object) -> decode_speed.Outcome:
        raise RuntimeError("no memory\nfor this")

    speed = Bench("tiny", target, PROMPT, LENGTH, A).timed("generate", 1, fail, deadline=float("inf"))
    assert speed.left_out == "failed: no memory"


def test_a_tree_is_no_deeper_than_the_drafter_reaches(target: Target) -> None:
    drafter = Medusa.create(MedusaConfig(num_heads=2), target)
    policies = decode_speed.shapes(drafter)
    assert policies["chain"].max_size == 3
    assert policies["tree"].topology.depth <= 2 < recycling_tree(decode_speed.TREE, decode_speed.WIDEST).depth


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode_speed.main(["--acceptance", "1.5"])
    assert "must lie between 0 and 1 and --batches be at least 1, got 1.5" in capsys.readouterr().err


@pytest.mark.long
def test_policies_of_an_artifact_take_turns(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode_speed.main(["--artifact", str(tiny_run / "artifact"), "--batches", "1", "3", "--new-tokens", "8", "--turns",
                       "1"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 8
    assert all(row.endswith(("1 of 1 |", "3 of 3 |")) for row in rows)
