"""A draft for a target of which this machine holds the embedding and the output layer alone: a server answers and gives
states, and the artifact drafts where the target is whole."""

import json
from pathlib import Path

import pytest
from draftsmith.modules import TargetConfig, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.__main__ import main
from support.answer_servers import serving
from support.prompt_files import many, write_prompts
from support.state_engines import StatesServer

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.long
@pytest.mark.slow
def test_a_target_on_disk_is_drafted_for_by_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "target", tmp_path / "run"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    prompts = write_prompts(tmp_path, many(30)).path
    with serving(StatesServer(load_target(TargetConfig(name=str(folder))), ids=(2,), folder=tmp_path)) as server:
        words = ["--config", str(TINY), "--family", "eagle", "--drafter", "{}", "--out", str(out),
                 "--target.name", str(folder), "--target.placement", "disk", "--prompts", "{}",
                 "--prompts.origin", "file", "--prompts.path", str(prompts), "--batch.states", "stored",
                 "--distill.max_new_tokens", "16", "--distill.validation_prompts", "4", "--train.max_steps", "6",
                 "--train.validate_every", "3", "--train.warmup_steps", "1"]
        asked = ["--distill.engine", f"{server.address}/v1", "--distill.states_from", f"{server.address}/v1"]
        assert main(["distill", *words]) == 2
        assert "an engine must answer and give states; set distill.engine and" in capsys.readouterr().err
        assert main(["run", *words, *asked]) == 2
        assert "call draftsmith distill and draftsmith train in place of run" in capsys.readouterr().err
        assert main(["distill", *words, *asked]) == 0
        assert f"{server.address}/v1 gives them; at a few rows they are the target's own" in capsys.readouterr().out
        # Answers and states are there: nobody is asked any more.
        answered = len(server.received)
        assert main(["train", *words, *asked]) == 0
    assert len(server.received) == answered
    assert "no size of it is measured here" in capsys.readouterr().out
    found = json.loads((out / "data" / "manifest.json").read_text())
    assert {"states_from", "workers"}.isdisjoint(found["recipe"]["distill"])
    assert main(["evaluate", "--artifact", str(out / "artifact"), "--target.name", str(folder), "--limit", "2",
                 "--max_new_tokens", "8", "--speed_prompts", "0", "--out", str(tmp_path / "evaluation")]) == 0
