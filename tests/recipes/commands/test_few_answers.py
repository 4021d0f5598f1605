"""Held-out answers as few and short as a busy machine leaves them: an artifact comes of them all the same."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from draftsmith.data import Manifest, TokenShard
from draftsmith.data.store.token_store import Row, hash_bytes
from draftsmith.recipes.__main__ import main
from draftsmith.trainers.base import LEAST_STEPS


def shortened(data: Path, kept: dict[float, int], tokens: int) -> None:
    """Keep so many held-out answers of each temperature, and of each its first tokens."""
    manifest, rows = Manifest.load(data), list[Row]()
    [record] = manifest.split("validation")
    shard = TokenShard.read(data / record.file, record.sha256)
    for temperature, answers in kept.items():
        for number in shard.answered_at(temperature)[:answers]:
            start, stop = shard.span(number)
            first = start + int(shard.supervised_T[start:stop].nonzero()[0])
            place = slice(start, min(stop, first + tokens))
            rows.append(Row(tokens=tuple(shard.tokens_T[place].tolist()), prompt=len(rows), temperature=temperature,
                            supervised=tuple(shard.supervised_T[place].tolist()), source="target"))
    few = TokenShard.from_rows(rows, range(len(rows)))
    (data / record.file).write_bytes(few.to_bytes())
    found = replace(record, sha256=hash_bytes(few.to_bytes()), rows=len(rows), by_target=len(rows), answers=len(rows),
                    prompts=len(rows), tokens=len(few.tokens_T), supervised=int(few.supervised_T.sum()))
    replace(manifest, shards=tuple(found if one == record else one for one in manifest.shards)).save(data)


@pytest.mark.parametrize(("family", "kept", "tokens"), [
    ("medusa", {0.0: 1, 1.0: 1}, 1), pytest.param("medusa", {0.0: 1}, 50, marks=pytest.mark.long),
    # It answers anew what it has changed: nothing of single tokens.
    pytest.param("medusa2", {0.0: 2, 1.0: 2}, 1, marks=pytest.mark.long)])
def test_an_artifact_with_a_tree_comes_of_few_held_out_tokens(
    tiny_run: Path, tmp_path: Path, family: str, kept: dict[float, int], tokens: int
) -> None:
    data = Path(shutil.copytree(tiny_run / "data", tmp_path / "data", ignore=lambda _, names: [
        name for name in names if "-validation" in name]))
    shortened(data, kept, tokens)
    states = [] if family == "medusa" else ["--batch.states", "computed"]
    assert main(["train", "--config", "tiny", "--family", family, "--drafter", "{}", *states, "--out",
                 str(tmp_path / "out"), "--data", str(data), "--train.max_minutes", "1e-6"]) == 0
    assert json.loads((tmp_path / "out" / "train" / "result.json").read_text())["accepted_length"] >= 1
    config = json.loads((tmp_path / "out" / "artifact" / "config.json").read_text())
    assert config["provenance"]["training"]["steps"] == LEAST_STEPS
    assert (tmp_path / "out" / "artifact" / "tuning.json").is_file()
