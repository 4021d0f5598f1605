"""The command trim: rows of a finished draft that stay, the artifact of them, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.data.store.token_store import count_labels, coverage
from draftsmith.export import load_artifact, save_artifact
from draftsmith.modules import (
    Adapter,
    Drafter,
    Eagle3,
    Medusa,
    MedusaConfig,
    Target,
    TargetConfig,
    Topology,
    UserError,
    load_target,
)
from draftsmith.modules.target.draft_vocabulary import draft_index
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.trim import TrimArguments, Trimming
from support.families import CASES, randomised
from support.tiers import others_long

KEPT = 40  # Entries that stay in most tests


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetConfig(name="tiny-random"))


def made(folder: Path, target: Target, drafter: Drafter, adapter: Adapter | None = None) -> Path:
    return save_artifact(folder / "artifact", drafter, target.identity, {"loops": {"answers": 0}}, Topology.chain(2),
                         adapter)


@pytest.mark.parametrize("name", others_long(CASES, ("medusa", "eagle3", "eagle4", "draft-lm", "block-markov")))
def test_every_family_keeps_its_own_rows_and_nothing_else_changes(
    name: str, tmp_path: Path, tiny_run: Path, target: Target
) -> None:
    """The logits of the trimmed draft are those of the whole one at its tokens, to the bit."""
    whole = randomised(CASES[name].make(target))
    given = TrimArguments(artifact=made(tmp_path, target, whole), out=tmp_path / "o", entries=5, data=tiny_run / "data")
    if getattr(whole.config, "correction", "") == "selector":
        with pytest.raises(UserError, match=r"needs its whole vocabulary .correction is 'selector'.*; trim another"):
            Trimming(given)
        return
    trimming = Trimming(given)
    (small, _), former = trimming.draft(5), trimming.stored.drafter
    small.eval()
    former.bind(trimming.decoder)
    former.eval()
    ids_Q = small.token_ids_Q
    assert ids_Q is not None
    counts_V = count_labels(tiny_run / "data")
    pool_P = former.token_ids_Q if former.token_ids_Q is not None else torch.arange(target.vocab_size)
    left_P = pool_P[~torch.isin(pool_P, ids_Q)]
    kept = [one for one in ids_Q.tolist() if one not in target.eos_ids]
    assert min(counts_V[kept]) >= counts_V[left_P].max(), "the commonest tokens stay"
    assert set(target.eos_ids) & set(pool_P.tolist()) <= set(ids_Q.tolist())
    features = trimming.shown[0]
    with torch.no_grad():
        ours, theirs = small(features), former(features)
        assert torch.equal(ours.hidden_BLKD, theirs.hidden_BLKD)
        places_Q = ids_Q if former.token_ids_Q is None else draft_index(former.token_ids_Q, target.vocab_size)[ids_Q]
        if isinstance(small, Eagle3) and isinstance(former, Eagle3) and small.head and former.head:
            assert torch.equal(small.head.down.weight, former.head.down.weight)
            assert torch.equal(small.head.up.weight, former.head.up.weight[places_Q])
            former.head.candidates = len(pool_P)
        for step in range(len(ours.offsets)):
            if not ours.choices:
                expected = former.project(theirs.hidden_BLKD[:, :, step], step)[..., places_Q]
                torch.testing.assert_close(small.project(ours.hidden_BLKD[:, :, step], step), expected, rtol=0,
                                           atol=1e-5)


@pytest.mark.long
def test_the_command_writes_the_draft_its_table_and_its_plot(
    tmp_path: Path, tiny_run: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = made(tmp_path / "a", target, randomised(CASES["eagle3"].make(target)))
    data, out = tiny_run / "data", tmp_path / "o"
    words = ["trim", "--artifact", str(artifact), "--data", str(data), "--out", str(out), "--entries", str(KEPT)]
    assert main(words) == 0
    printed, page = capsys.readouterr().out, (out / "trim.html").read_text()
    whole = CASES["eagle3"].make(target).config.vocabulary_size or target.vocab_size
    found = load_artifact(out / "artifact", target)
    assert found.drafter.token_ids_Q is not None
    facts = found.provenance
    assert facts["trimmed"] == {"weights_sha256": load_artifact(artifact, target).weights_sha256, "entries": whole}
    held = coverage(data, found.drafter.token_ids_Q)
    assert facts["draft_vocabulary"] == {"tokens": KEPT, "held_out_coverage": held}
    assert not {"loops", "acceptance"} & facts.keys()
    assert found.tuning is not None
    assert f"{KEPT} of {whole:,} entries hold {held:.1%}" in printed
    assert re.search(rf"(?m)^{KEPT} +{held:.1%} +[\d.]+ +[\d.]+ +[\d.]+$", printed)
    assert "<svg" in page
    assert "trimmed from" in (out / "artifact" / "README.md").read_text()
    # Greedy answers are the target's own, whatever the entries.
    assert main(["evaluate", "--artifact", str(out / "artifact"), "--out", str(tmp_path / "e"), "--limit", "2",
                 "--max_new_tokens", "8", "--speed_prompts", "0", "--temperatures", "[0]"]) == 0
    measured = json.loads((tmp_path / "e" / "evaluation.json").read_text())["lossless"]
    assert measured["identical"] + measured["near_tie_divergences"] == 2
    assert main(words) == 2
    assert "o is not a new or empty folder; choose another --out" in capsys.readouterr().err


@pytest.mark.long
def test_without_a_number_the_fastest_is_taken_and_the_whole_draft_stays(
    tmp_path: Path, tiny_run: Path, target: Target, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, measured = made(tmp_path / "a", target, randomised(CASES["medusa"].make(target))), Trimming.measured
    for best in (None, 16):
        monkeypatch.setattr(Trimming, "measured", lambda self, entries, best=best: replace(
            measured(self, entries), speedup=2.0 if entries == (best or self.entries) else 1.5))
        out = tmp_path / str(best)
        assert main(["trim", "--artifact", str(artifact), "--data", str(tiny_run / "data"), "--out", str(out)]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert (out / "trim.html").is_file()
        if best is None:
            assert "no artifact is written; give --entries to trim all the same" in printed
            assert not (out / "artifact").exists()
        else:
            assert load_artifact(out / "artifact", target).drafter.config.vocabulary_size == best


@pytest.mark.parametrize(("words", "message"), [
    (("--entries", "0"), r"entries must lie between 1 \(the target's end tokens\) and \d+, one less than the draft "
                         r"has, got 0; choose one of these, or leave it out"),
    (("--entries", "100000"), "got 100000; choose"),
    (("--entries", "some"), "entries must be"),
    (("--data", "gone"), "manifest"),
])
def test_what_cannot_be_trimmed_is_refused_before_the_target_is_read(
    tmp_path: Path, tiny_run: Path, target: Target, words: tuple[str, ...], message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("draftsmith.recipes.commands.trim.load_target", lambda _: pytest.fail("the target was read"))
    few = Medusa.create(MedusaConfig(vocabulary_size=2), target, torch.tensor([target.eos_ids[0], 20]))
    given = ["--artifact", str(made(tmp_path, target, few)), "--out", str(tmp_path / "o"),
             "--data", str(tiny_run / "data")]
    assert main(["trim", *given, *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "o").exists()
