"""`draftsmith layers`: searched once for a target, and a file that fits no target is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from draftsmith.modules import TargetConfig, UserError, load_target
from draftsmith.recipes.__main__ import main

WORDS = ("layers", "--target.name", "tiny-random", "--minutes", "0.01", "--limit", "2", "--max-new-tokens", "8")


def test_a_target_is_searched_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, words = tmp_path / "layers.json", [*WORDS, "--out", str(tmp_path / "layers.json")]
    assert main(words) == 0
    assert "choices were judged by 16 tokens of answers" in capsys.readouterr().out
    written = file.read_bytes()
    assert main(words) == 0
    assert f"{file} holds the layers of this target already; delete it to search anew" in capsys.readouterr().out
    assert file.read_bytes() == written
    record = json.loads(written)
    assert bool(record["kept"]) is (record["speed_up"] > 1)
    assert main([*words, "--target.kept_layers", str(file)]) == 2
    assert "names layers that were found, and this command searches" in capsys.readouterr().err
    file.write_text(json.dumps({**record, "kept": [1], "speed_up": 1.5}))
    assert load_target(TargetConfig(name="tiny-random", kept_layers=str(file))).kept_layers == (1,)
    for changes, says in (({"kept": []}, "no layers of this target pay as its draft; leave target.kept_layers out"),
                          ({"weights_hash": "0"}, "with other weights; search those of tiny-random"),
                          ({"tokens": "many"}, "is damaged: tokens must be a whole number")):
        file.write_text(json.dumps({**record, "kept": [1], **changes}))
        with pytest.raises(UserError, match=says):
            load_target(TargetConfig(name="tiny-random", kept_layers=str(file)))
    file.write_text(json.dumps({**record, "weights_hash": "0"}))
    assert main(words) == 2
    assert "holds layers of a target with other weights" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "says"), [
    ({"--minutes": "0"}, "minutes must be above 0"), ({"--prompts": "gone.jsonl"}, "cannot read the prompts gone"),
    ({"--limit": "0"}, "limit must be")])
def test_wrong_settings_are_refused_before_a_target_is_loaded(changes: dict[str, Any], says: str, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--out", str(tmp_path / "layers.json"), *(word for one in changes.items() for word in one)]
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "layers.json").exists()
