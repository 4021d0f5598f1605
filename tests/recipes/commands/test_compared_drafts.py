"""`draftsmith evaluate` on sets by name, and next to published drafts: exports of the package's own drafts take the
place of checkpoints on the Hub, a cache of its shape that of a network."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
from draftsmith.data.prompts.named_sets import TABLE
from draftsmith.export import export_artifact, load_artifact
from draftsmith.modules import TargetConfig, load_target
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS, perform_stages, stages
from draftsmith.recipes.commands.published import facts
from draftsmith.recipes.stages.workspace import Workspace
from support.data.named_sets import ROWS, cache_sets
from torch import nn

QUICK = ("--max_new_tokens", "8", "--speed_prompts", "0")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub, with every set."""
    cache_sets(tmp_path / "hub", monkeypatch)
    return tmp_path / "hub"


@pytest.fixture
def published(tiny_run: Path, cache: Path) -> Path:
    """The tiny draft as OWNER/NAME on the Hub, in the layout of Medusa, with a card."""
    target = load_target(TargetConfig(name="tiny-random"))
    commit = cache / "models--owner--name" / "refs" / "main"
    commit.parent.mkdir(parents=True)
    commit.write_text("a" * 40)
    folder = export_artifact(load_artifact(tiny_run / "artifact", target), target, "medusa-vllm",
                             commit.parents[1] / "snapshots" / ("a" * 40))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A draft\n")
    (folder / "origin.json").unlink()
    return folder


def evaluated(out: Path, *words: str) -> dict[str, Any]:
    assert main(["evaluate", "--out", str(out), *QUICK, *words]) == 0
    found: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return found


def test_sets_by_name_with_their_origin_and_a_table_by_category(tiny_run: Path, tmp_path: Path) -> None:
    words = ("--artifact", str(tiny_run / "artifact"), "--prompts", "[mt_bench,math500,handwritten]",
             "--prompt_limit", "2")
    found = evaluated(tmp_path / "out", *words)
    first, second, third = found["header"]["sets"].values()
    assert (first["source"], first["licence"], first["rows"], first["prompts"]) == (
        "HuggingFaceH4/mt_bench_prompts", "apache-2.0", 6, 2)
    assert len(second["revision"]) == 40
    assert third["source"] == "handwritten.jsonl"
    assert found["by_prompt_set"].keys() == {"mt_bench", "math500", "handwritten"}
    # Two questions of two turns each.
    assert (found["by_prompt_set"]["mt_bench"]["prompts"], found["by_turn"].keys()) == (4, {"1", "2"})
    assert {"math500 math"} < found["by_category"].keys()
    assert "math" not in found["by_category"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert (f"source HuggingFaceH4/MATH-500, revision {second['revision']}, split test, licence none stated, rows 3, "
            "prompts 2") in page


def test_a_prompt_that_is_too_long_is_left_out_of_a_set_and_counted(
    tiny_run: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"article": "It rained. " * 300, "highlights": "Rain.", "id": "b"}
    cache_sets(cache, monkeypatch, cnn_dailymail=[*ROWS["cnn_dailymail"], long])
    words = ("--artifact", str(tiny_run / "artifact"), "--prompts", "cnn_dailymail")
    found = evaluated(tmp_path / "out", *words)["header"]["sets"]["cnn_dailymail"]
    assert (found["rows"], found["prompts"], found["too long"]) == (2, 1, 1)
    cache_sets(cache, monkeypatch, cnn_dailymail=[long])
    assert main(["evaluate", "--out", str(tmp_path / "none"), *QUICK, *words]) == 2
    assert "no prompt of the set cnn_dailymail leaves room for 8 tokens" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_draft_next_to_a_published_one(
    tiny_run: Path, tmp_path: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tiny_run / "artifact"
    found = evaluated(tmp_path / "out", "--artifact", f"[{mine},hub:owner/name,{published}]", "--prompts", "mt_bench",
                      "--policies", "chain-2")
    drafts = found["header"]["drafts"]
    assert list(drafts)[1] == "owner/name, chain-2"
    assert all(one["parameters"] > 0 for one in drafts.values())
    assert [one["licence"] for one in drafts.values()] == ["not stated", "mit", "mit"]
    assert drafts["owner/name, chain-2"]["format"] == "medusa"
    # The same weights, so that chains of equal length are accepted alike.
    [difference, _] = found["differences"]
    assert difference.startswith("0.00 above owner/name on mt_bench: ")
    said = " ".join(capsys.readouterr().out.split())
    assert "parameters licence" in said
    assert difference in said
    card = ["push", "--folder", str(mine), "--repository", "a/b", "--licence", "mit", "--base_model", "c/d",
            "--evaluation", str(tmp_path / "out" / "evaluation.json")]
    assert main(card) == 0
    said = capsys.readouterr().out
    assert f"- {difference}." in said
    assert "- mt_bench: source HuggingFaceH4/mt_bench_prompts, revision " in said
    assert "| mt_bench | 12 |" in said


@pytest.mark.parametrize(("card", "licence"), [
    (b"---\nname: x\nlicense: 'mit' # free\n---\n\xff", "mit"),
    (b"---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
    (b"---\nlicense:\n- mit\n- no\nother: 1\n---\n", "mit, no"), (b"---\nlicense: \"mit\n---\n", "mit"),
    (b"---\nlicense:\nother: 1\n---\n", "not stated"), (b"license: mit\n", "not stated"),
])
def test_the_licence_is_that_of_the_card(card: bytes, licence: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(card)
    nothing: Any = SimpleNamespace(drafter=nn.Module(), provenance={})
    assert facts(nothing, tmp_path, "a")["licence"] == licence


@pytest.mark.parametrize(("artifact", "words", "sentence"), [
    ("hub:owner/other", ("--target.name", "tiny-random"), "owner/other is not in the cache and cannot be downloaded"),
    ("hub:owner/name", (), "owner/name does not name the target that it drafts for; give it with --target.name"),
    ("[{mine},{mine}/]", (), "artifact names {mine} more than once; name each artifact once"),
    ("[hub:owner/name,hub:owner/name]", (), "artifact names hub:owner/name more than once"),
    ("[{mine},hub:owner/name]", (), "owner/name is no checkpoint in the layout medusa or another one: {config} "
     "says vocab_size: 12, but tiny-random has "),
])
def test_a_published_draft_that_does_not_fit_writes_nothing(
    tiny_run: Path, tmp_path: Path, published: Path, artifact: str, words: tuple[str, ...], sentence: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").unlink()
    (published / "config.json").write_text(json.dumps({**config, "vocab_size": 12}))
    assert main(["evaluate", "--out", str(tmp_path / "out"), "--artifact", artifact.format(mine=tiny_run / "artifact"),
                 *words]) == 2
    assert sentence.format(config=published / "config.json", mine=tiny_run / "artifact") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "sentence"), [
    (("--prompt_limit", "3"), "prompt_limit 3 draws from the sets that evaluate.prompts names, and it names none"),
    (("--prompts", "[]"), "prompts must hold at least one name, such as mt_bench"),
    (("--prompts", "[gsm8k,gsm8k]"), "prompts must be different from each other, got gsm8k, gsm8k"),
    (("--prompts", "[gsm8k,gsm8k.jsonl]"), "two sets are called gsm8k; rename a file of evaluate.prompts"),
    (("--prompts", "[gsm8k,none.jsonl]"), "cannot read the prompts none.jsonl"),
])
def test_wrong_sets_are_one_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gsm8k.jsonl").write_text('{"prompt": "hi"}\n')
    assert main(["evaluate", "--target.name", "tiny-random", "--baselines", "ngrams", "--out", "out", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_run_is_measured_on_a_set_which_decides_its_evaluation(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    words = ["--config", "tiny", "--out", str(out), "--evaluate.limit", "1", "--evaluate.max_new_tokens", "8",
             "--evaluate.speed_prompts", "0"]
    plain, named = (Workspace(COMMANDS["run"].parse([*words, *more])) for more in (
        [], ["--evaluate.prompts", "gsm8k", "--evaluate.prompt_limit", "1"]))
    assert stages(named)[-1].reads["evaluate.prompts"] == [TABLE]
    assert named.decisive["evaluate"] == {**plain.decisive["evaluate"], "prompts": "gsm8k", "prompt_limit": 1}
    # A run from before there were sets stays finished.
    assert "evaluate.prompts" not in stages(plain)[-1].reads
    perform_stages(named)
    assert json.loads((out / "evaluation.json").read_text())["by_prompt_set"].keys() == {"own", "gsm8k"}
    assert main(["run", *words, "--evaluate.prompts", "gsm8"]) == 2
    assert "'gsm8', which is neither a set nor a file: did you mean gsm8k" in capsys.readouterr().err
