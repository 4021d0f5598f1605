"""The trial of an export in vLLM, with a script in place of vLLM: its job, its findings, its refusals; and weights of
fewer bits: what an engine reads from the file, and what the drafter loses by it."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gguf
import pytest
import torch
from draftsmith.export import Artifact, ExportSettings, Trial, TrialSettings, export_artifact, try_export
from draftsmith.export.evaluation.engine_trial import (
    BatchTrial,
    chain_length,
    rounded_artifact,
    served,
    tried_tokens,
    vllm_answers,
)
from draftsmith.export.layouts.parts.gguf_file import rounded
from draftsmith.export.layouts.registry import format_named
from draftsmith.modules import Adapter, DraftLM, DraftLMConfig, Hydra, HydraConfig, Target, UserError, decode
from draftsmith.modules.decoding.requests import DecodeSettings, Request
from draftsmith.modules.families.eagle.drafter import Eagle, EagleConfig
from draftsmith.modules.families.eagle3.drafter import Eagle3, Eagle3Config
from draftsmith.recipes.__main__ import main
from safetensors.torch import load_file
from support.artifacts import TREE, heads
from support.families import IDS
from support.target_folders import write_vocabulary
from support.targets import six_layers

from ..layouts.test_engine_contracts import written

PROMPTS = [[5, 9, 11], [7, 8]]
SETTINGS = TrialSettings(draft_tokens=(2, 1), max_new_tokens=6)
TOLD = """#!{python}
import json, sys
from pathlib import Path
job = json.loads(Path(sys.argv[2]).read_text())
dtype = {{"auto": "float16"}}.get(job["dtype"], job["dtype"])
answers = json.loads(Path({answers!r}).read_text())
Path({log!r}).open("a").write(json.dumps(job) + "\\n")
drafted = job["speculative"] is not None
runs = [{{"batch_size": size, "seconds": 0.5 * (1 + (size > 4)) if drafted else 0.8, "tokens": 12, "answers": answers,
          "first_token": 0.01 * size,
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
    tried = [("float32", 0), ("float32", 2), ("float16", 0), ("float16", 2), ("float16", 1)]
    assert [(one.dtype, one.tokens, one.batch_size, one.speed, one.first_token, one.equal, one.accepted_length)
            for one in trial.batches] == [
                (dtype, tokens, size, (12.0 if size > 4 else 24.0) if tokens else 15.0, 0.01 * size, 2,
                 3.0 if tokens else 1.0) for dtype, tokens in tried for size in (1, 4, 8)]
    assert trial.advice == ("the fastest tokens of a draft in float16, by requests at once: 2 for 1 to 4, none for 5 "
                            'to 8; set "num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 4, '
                            "2], [5, 8, 0]] in --speculative-config")
    slow = replace(trial, batches=tuple(replace(one, speed=one.speed / (1 + one.tokens)) for one in trial.batches))
    assert slow.advice.endswith("none for 1 to 8; serve the target alone on this machine")
    assert '"num_speculative_tokens": 2 in' in replace(trial, varies=False).advice, "vLLM's Medusa takes no table"
    jobs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [job["dtype"] for job in jobs] == ["float32", "float32", "auto", "auto", "auto"], (
        "not every GPU has bfloat16")
    plain, drafted = jobs[:2]
    assert plain["speculative"] is None
    assert drafted["speculative"] == {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    assert drafted["prompts"] == PROMPTS
    assert "| float32 | none | 8 | 15.0 | 0.080 | 2 of 2 | 1.00 |  |" in trial.table()
    assert "| float32 | 2 | 8 | 12.0 | 0.080 | 2 of 2 | 3.00 | 3.00 |" in trial.table()
    with pytest.raises(UserError, match=r"prompt 0 has 512 tokens and asks for 6 more, but .* holds 512; shorten the"):
        try_export(artifact, "huggingface", folder, program, [[5] * tiny_target.context_length], SETTINGS)
    less = try_export(artifact, "huggingface", folder, interpreter(tmp_path, tiny_target, 15), PROMPTS, SETTINGS)
    assert less.fault == ("vLLM 0 accepts 2.50 tokens per pass at batch 1, this project's own chain 3.00: it does not "
                          "read the draft as it was trained")


def test_other_answers_are_a_fault_but_for_a_near_tie() -> None:
    batch = BatchTrial(dtype="float32", tokens=3, batch_size=8, speed=1.0, first_token=0.1, equal=8,
                       accepted_length=2.0)
    trial = Trial(engine="vLLM 0", answers=10, own_length=2.0, tokens=3, varies=True, batches=(batch,))
    assert trial.fault == "with drafts vLLM 0 gives 2 of 10 other answers than without, at batch 8"
    tie = replace(trial, batches=(replace(batch, equal=9),))
    assert tie.fault == ""
    assert tie.note.startswith("answers that differ with the draft: 1 of 10 in float32 at batch 8 with 3 tokens; a ")
    assert replace(trial, batches=(replace(batch, equal=10, accepted_length=2.19),)).fault == ""
    half = replace(trial, batches=(replace(batch, dtype="bfloat16", equal=3, accepted_length=1.9),))
    assert half.fault == ""
    assert half.note.startswith("answers that differ with the draft: 7 of 10 in bfloat16 at batch 8 with 3 tokens; a")
    assert half.note.endswith("rounds otherwise than a pass over one, least with --dtype float32")
    assert "accepts 2.21" in replace(trial, batches=(replace(batch, equal=10, accepted_length=2.21),)).fault


def test_a_few_numbers_of_tokens_are_tried(tiny_target: Target) -> None:
    model = DraftLM.create(DraftLMConfig(layers=(0,)), tiny_target)
    assert [tried_tokens(model, first) for first in (1, 2, 3, 4)] == [(1, 3), (2, 1, 4), (3, 1, 5), (4, 2, 6)]
    assert tried_tokens(heads(tiny_target), 3) == (3, 1), "there is no fourth head"


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
        vllm_answers(program(tmp_path, lines), tmp_path, "m", None, PROMPTS, context=8, max_tokens=1)


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


# Weights of fewer bits ------------------------------------------------------------------------------------------------


def as_exported(name: str, weights: str) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """The weights as an engine reads them from a format."""
    return lambda weight, linear: format_named(name).as_read(weight, weights, linear)


@pytest.fixture(scope="module")
def artifact(tiny_target: Target) -> Artifact:
    drafter = DraftLM.create(DraftLMConfig(layers=(0, 1)), tiny_target)
    return Artifact(drafter=drafter, target=tiny_target, topology=TREE, identity=tiny_target.identity, provenance={})


@pytest.mark.parametrize(("weights", "kinds", "error"), [
    ("float32", {"F32"}, 0.0), ("bfloat16", {"F32", "BF16"}, 2 ** -8), ("int8", {"F32", "Q8_0"}, 1 / 127),
])
def test_a_file_holds_the_weights_that_are_measured(
    tmp_path: Path, artifact: Artifact, weights: str, kinds: set[str], error: float
) -> None:
    settings = ExportSettings(target_gguf=write_vocabulary(tmp_path / "target.gguf", artifact.target.vocab_size),
                              weights=weights)
    file = export_artifact(artifact, artifact.target, "gguf", tmp_path / "out", settings) / "draft.gguf"
    read = {one.name: one for one in gguf.GGUFReader(file).tensors}
    assert {one.tensor_type.name for one in read.values()} == kinds
    held = read["blk.1.ffn_down.weight"]
    found = torch.from_numpy(gguf.quants.dequantize(held.data, held.tensor_type).copy())
    own = artifact.drafter.state_dict()["decoder.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(found, rounded(own, weights), rtol=0, atol=0)
    assert (found - own).abs().max() <= error * own.abs().max()
    assert bool(error) == bool((found != own).any())
    number = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"}[weights]
    assert f"`blk.0.ffn_down.weight` to `blk.1.ffn_down.weight` (2) | [32, 64] | {number} |" in (
        tmp_path / "out" / "README.md").read_text()


def test_rows_without_whole_blocks_stay_in_bfloat16() -> None:
    weight = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded(weight, "int8"), weight.bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(rounded(weight[0], "int8"), weight[0], rtol=0, atol=0)


def test_the_loss_is_measured_on_a_copy(artifact: Artifact) -> None:
    before = {name: tensor.clone() for name, tensor in artifact.drafter.state_dict().items()}
    prompts, settings = [[5, 9, 11], [7, 8]], SETTINGS
    # A draft that is the target itself: every guess is accepted.
    same = rounded_artifact(artifact, as_exported("gguf", "float32"))
    assert [chain_length(one, prompts, settings) for one in (artifact, same)] == [3.0, 3.0]
    noisy = rounded_artifact(artifact, as_exported("gguf", "int8")).drafter.state_dict()
    changed = {name for name in before if not torch.equal(noisy[name], before[name])}
    assert {before[name].ndim for name in changed} == {2}
    assert all(torch.equal(tensor, before[name]) for name, tensor in artifact.drafter.state_dict().items())


@pytest.mark.parametrize(("weights", "number", "error"), [("int8", torch.int8, 0.5001 / 127),
                                                          ("float8", torch.float8_e4m3fn, 2 ** -4)])
def test_a_folder_holds_the_weights_that_are_measured(
    tmp_path: Path, artifact: Artifact, weights: str, number: torch.dtype, error: float
) -> None:
    settings = ExportSettings(weights=weights)
    folder = export_artifact(artifact, artifact.target, "huggingface", tmp_path / "out", settings)
    held = load_file(folder / "model.safetensors")
    own = rounded_artifact(artifact, as_exported("huggingface", weights)).drafter.state_dict()
    trained = artifact.drafter.state_dict()
    for name, tensor in held.items():
        # The rows of a matrix have scales of their own; the embedding has none, norms keep all bits.
        scales = held.get(f"{name}_scale")
        whole = torch.float32 if tensor.ndim < 2 or "scale" in name else torch.bfloat16
        assert tensor.dtype == (whole if scales is None else number), name
        if "scale" not in name:
            read = tensor.float() * (1.0 if scales is None else scales)
            inside = name.replace("model.", "decoder.", 1).replace("lm_head", "head")
            torch.testing.assert_close(own[inside], read, rtol=0, atol=0)
            rows = trained[inside].abs().amax(-1, keepdim=True) if scales is not None else trained[inside].abs()
            assert ((read - trained[inside]).abs() <= rows * (error if scales is not None else 2 ** -8)).all(), name
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in held if name.endswith("_scale")} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    config = json.loads((folder / "config.json").read_text())
    kind = "int" if weights == "int8" else "float"
    assert config["quantization_config"]["format"] == f"{kind}-quantized"
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] == kind
    assert config["quantization_config"]["ignore"] == []
    assert config["quantization_config"]["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head"]


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
@pytest.mark.parametrize("output", ["copy", "shared"])
def test_eagle_3_in_fewer_bits(tmp_path: Path, layout: str, output: Literal["copy", "shared"]) -> None:
    target = six_layers()
    drafter = Eagle3.create(Eagle3Config(taps=(1, 2, 4), vocabulary_size=len(IDS), output=output), target, IDS)
    held = {}
    for weights in ("float32", "bfloat16", "int8"):
        folder = written(drafter, target, layout, tmp_path / weights, ExportSettings(weights=weights))
        held[weights] = load_file(folder / "model.safetensors")
        assert ("quantization_config" in json.loads((folder / "config.json").read_text())) == (weights == "int8")
    first = "midlayer" if layout == "eagle" else "layers.0"
    own = ["lm_head.weight"] if output == "copy" else []
    for name in ("fc.weight", f"{first}.self_attn.q_proj.weight", *own):
        torch.testing.assert_close(held["int8"][name] * held["int8"][f"{name}_scale"], held["float32"][name], rtol=0,
                                   atol=float(held["float32"][name].abs().max()) / 127)
    assert held["int8"]["lm_head.weight"].dtype == (torch.int8 if own else torch.bfloat16)
    assert held["bfloat16"]["lm_head.weight"].dtype == held["bfloat16"]["fc.weight"].dtype == torch.bfloat16
    said = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ([] if own else ["lm_head"]), "vLLM shares the target's output layer where both are equal"
    assert {held["int8"][name].dtype for name in ("d2t", "t2d", "norm.weight")} == {
        torch.int64, torch.bool, torch.float32}


def test_an_unknown_number_format_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    for layout, weights, said in (
        ("gguf", "float8", r"weights must be one of float32, bfloat16, int8 in the format gguf, got 'float8'"),
        ("huggingface", "int4", r"weights must be one of .* in the format huggingface, got 'int4'"),
        ("medusa", "int8", r"the format medusa holds its weights as they were trained, got weights 'int8'; leave it "
                           r"out, or choose --format dflash, eagle, huggingface, speculators, gguf"),
    ):
        with pytest.raises(UserError, match=said):
            export_artifact(artifact, artifact.target, layout, tmp_path / "out", ExportSettings(weights=weights))
    assert not (tmp_path / "out").exists()
