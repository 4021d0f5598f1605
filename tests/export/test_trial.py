"""The trial of an export in vLLM, with a script in place of vLLM: its job, its findings, its refusals."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.export import Artifact, Trial, TrialSettings, export_artifact, try_export
from draftsmith.export.engines.trial import BatchTrial, VllmProcess, chain_length, served
from draftsmith.modules import (
    Adapter,
    DecodeSettings,
    DraftLM,
    DraftLMConfig,
    Eagle,
    EagleConfig,
    Hydra,
    HydraConfig,
    Request,
    Target,
    UserError,
    decode,
)
from draftsmith.recipes.__main__ import main
from support.artifacts import TREE, heads

PROMPTS = [[5, 9, 11], [7, 8]]
SETTINGS = TrialSettings(draft_tokens=2, max_new_tokens=6)
TOLD = """#!{python}
import json, sys
from pathlib import Path
job = json.loads(Path(sys.argv[2]).read_text())
dtype = {{"auto": "float16"}}.get(job["dtype"], job["dtype"])
answers = json.loads(Path({answers!r}).read_text())
Path({log!r}).open("a").write(json.dumps(job) + "\\n")
drafted = job["speculative"] is not None
runs = [{{"batch_size": size, "seconds": 0.5 if drafted else 1.0, "tokens": 12, "answers": answers,
          "drafts": 10 * drafted, "drafted": 20 * drafted, "accepted": {accepted} * drafted}}
        for size in job["batch_sizes"]]
Path(sys.argv[3]).write_text(json.dumps({{"engine": "vLLM 0", "dtype": dtype, "runs": runs}}))
"""


def as_artifact(drafter: Any, target: Target) -> Artifact:
    return Artifact(drafter=drafter, target=target, topology=TREE, identity=target.identity, provenance={})


def interpreter(folder: Path, target: Target, accepted: int) -> Path:
    """A program in place of a Python with vLLM: it notes its job and gives the target's own answers."""
    answers = [one.tokens for one in decode(target, [Request(tuple(prompt), index, 6) for index, prompt in
                                                     enumerate(PROMPTS)], DecodeSettings()).generations]
    (folder / "answers.json").write_text(json.dumps(answers))
    program = folder / "python"
    program.write_text(TOLD.format(python=sys.executable, answers=str(folder / "answers.json"),
                                   log=str(folder / "log"), accepted=accepted))
    program.chmod(0o755)
    return program


def test_a_trial_serves_the_export_with_its_target(tmp_path: Path, tiny_target: Target) -> None:
    artifact = as_artifact(DraftLM.create(DraftLMConfig(layers=(0, 1)), tiny_target), tiny_target)
    folder = export_artifact(artifact, tiny_target, "huggingface", tmp_path / "out")
    # A draft that is the target itself: every guess is accepted.
    assert chain_length(artifact, PROMPTS, SETTINGS) == 3.0
    program = interpreter(tmp_path, tiny_target, accepted=20)
    trial = try_export(artifact, "huggingface", folder, program, PROMPTS, SETTINGS)
    assert (trial.engine, trial.answers, trial.own_length, trial.fault) == ("vLLM 0", 2, 3.0, "")
    assert [(one.dtype, one.batch_size, one.plain_speed, one.draft_speed, one.equal, one.accepted_length)
            for one in trial.batches] == [
                (dtype, size, 12.0, 24.0, 2, 3.0) for dtype in ("float32", "float16") for size in (1, 8)]
    jobs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [job["dtype"] for job in jobs] == ["float32", "float32", "auto", "auto"], (
        "not every GPU has bfloat16")
    plain, drafted = jobs[:2]
    assert plain["speculative"] is None
    assert drafted["speculative"] == {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    assert drafted["prompts"] == PROMPTS
    assert "| float32 | 8 | 12.0 | 24.0 | 2.00 | 2 of 2 | 3.00 | 3.00 |" in trial.table()
    less = try_export(artifact, "huggingface", folder, interpreter(tmp_path, tiny_target, 15), PROMPTS, SETTINGS)
    assert less.fault == ("vLLM 0 accepts 2.50 tokens per pass at batch 1, this project's own chain 3.00: it does not "
                          "read the draft as it was trained")


def test_other_answers_are_a_fault_but_for_a_near_tie() -> None:
    batch = BatchTrial(dtype="float32", batch_size=8, plain_speed=1.0, draft_speed=1.0, equal=8, accepted_length=2.0)
    trial = Trial(engine="vLLM 0", answers=10, own_length=2.0, batches=(batch,))
    assert trial.fault == "with drafts vLLM 0 gives 2 of 10 other answers than without, at batch 8"
    tie = replace(trial, batches=(replace(batch, equal=9),))
    assert tie.fault == ""
    assert tie.note.startswith("answers that differ with the draft: 1 of 10 in float32 at batch 8; a pass over several")
    assert replace(trial, batches=(replace(batch, equal=10, accepted_length=2.19),)).fault == ""
    half = replace(trial, batches=(replace(batch, dtype="bfloat16", equal=3, accepted_length=1.9),))
    assert half.fault == ""
    assert half.note.startswith("answers that differ with the draft: 7 of 10 in bfloat16 at batch 8; a pass over")
    assert half.note.endswith("rounds otherwise than a pass over one, least with --dtype float32")
    assert "accepts 2.21" in replace(trial, batches=(replace(batch, equal=10, accepted_length=2.21),)).fault


def test_every_layout_has_its_method(tiny_target: Target) -> None:
    masks = DraftLM.create(DraftLMConfig(layers=(0,), depths=2, mask_token_id=3), tiny_target)
    assert served(as_artifact(masks, tiny_target), "huggingface").method == {
        "method": "draft_model", "parallel_drafting": True}
    first = as_artifact(Eagle.create(EagleConfig(), tiny_target), tiny_target)
    assert served(first, "eagle").method == {"method": "eagle"}
    medusa = as_artifact(heads(tiny_target), tiny_target)
    assert served(medusa, "medusa").loader == {}
    assert served(medusa, "medusa-vllm").loader == {}
    reduced = as_artifact(heads(tiny_target, output="one_copy", vocabulary_size=20), tiny_target)
    assert served(reduced, "medusa-vllm").loader == {"enable_weights_track": False}
    hydra = as_artifact(Hydra.create(HydraConfig(), tiny_target), tiny_target)
    for artifact, layout, remedy in ((hydra, "hydra", ""), (first, "eagle-sglang", ", or choose --format eagle")):
        with pytest.raises(UserError, match=f"reads no {layout}; leave try_with out{remedy}$"):
            served(artifact, layout)
    with pytest.raises(UserError, match="changes its target, and a trial in vLLM compares with an unchanged one"):
        served(replace(medusa, adapter=Adapter({}, 1.0)), "medusa")


def program(folder: Path, lines: str) -> Path:
    """An executable file in place of an interpreter."""
    (folder / "python").write_text(f"#!/bin/sh\n{lines}\n")
    (folder / "python").chmod(0o755)
    return folder / "python"


@pytest.mark.parametrize(("lines", "said"), [
    ("echo no such model\nexit 3", "code 3, drafts null; its last lines:\nno such model$"),
    ("exit 137", "code 137, drafts null; it printed nothing: try a machine with more memory, or run it by hand"),
    ("printf '\\377 broken'\nexit 1", "code 1, drafts null; its last lines:\n. broken"),
])
def test_a_failed_process_is_shown(tmp_path: Path, lines: str, said: str) -> None:
    with pytest.raises(UserError, match=f"vLLM ended with {said}"):
        VllmProcess(program(tmp_path, lines), tmp_path, 8).run("m", None, PROMPTS, max_tokens=1)


@pytest.mark.parametrize(("lines", "said"), [
    (None, r"there is no interpreter .*python; give the bin/python of an environment with vLLM"),
    ("exit 0", "python does not answer as Python 3 does; give the bin/python of an environment with vLLM"),
    (f"exec {sys.executable} -I -S \"$@\"", "there is no vLLM in the environment of .*python; give the bin/python"),
    ("", "python does not start .Permission denied.; give the bin/python of an environment with vLLM"),
])
@pytest.mark.parametrize("option", ["try_with", "convert_with"])
def test_an_interpreter_without_the_engine_is_refused_before_anything_is_read(
    tmp_path: Path, lines: str | None, said: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if lines is not None:
        program(tmp_path, lines).chmod(0o755 if lines else 0o644)
    form = {"try_with": "medusa", "convert_with": "openvino"}[option]
    words = ["export", "--artifact", str(tmp_path / "none"), "--format", form, "--out", str(tmp_path / "out")]
    assert main([*words, f"--{option}", str(tmp_path / "python")]) == 2
    found = capsys.readouterr().err
    assert re.search(said.replace("vLLM", {"try_with": "vLLM", "convert_with": "optimum-intel"}[option]), found)
    assert not (tmp_path / "out").exists()
