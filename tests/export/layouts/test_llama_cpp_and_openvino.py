"""The layout of llama.cpp: its files read back by transformers' own reader of GGUF, or tensor by tensor; and that of
OpenVINO GenAI, with a script in place of the conversion: its job, its folder, its refusals."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from draftsmith.export import ExportSettings
from draftsmith.export.layouts.llama_cpp import GGUF_FILE, write_model
from draftsmith.modules import Drafter, DraftLM, DraftLMConfig, Eagle3, Eagle3Config, Target, TargetConfig, UserError
from draftsmith.modules.families.draft_lm.drafter import as_model
from draftsmith.modules.parts.attention import rotation
from draftsmith.modules.target.loading.loading import find_default_gguf, gguf_of
from safetensors.torch import load_file
from support.artifacts import heads
from support.families import IDS
from support.target_folders import write_vocabulary
from support.targets import six_layers, tied_target
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config

from .test_engine_contracts import written

TOKENS = torch.arange(4, 60, 5)[None]
SHAPE = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}


@pytest.fixture(scope="module")
def target() -> Target:
    return six_layers()


def exported(drafter: Drafter, target: Target, folder: Path) -> Path:
    """The GGUF file of a drafter."""
    settings = ExportSettings(target_gguf=write_vocabulary(folder / "target.gguf", target.vocab_size))
    return written(drafter, target, "gguf", folder / "out", settings) / GGUF_FILE


def field(file: Path, key: str) -> Any:
    return gguf.GGUFReader(file).fields[key].contents()


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_model_reads_back_as_it_was(tmp_path: Path, target: Target, tied: bool) -> None:
    drafter = DraftLM.create(DraftLMConfig(num_layers=2), tied_target() if tied else target)
    file = exported(drafter, target, tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=GGUF_FILE, dtype=torch.float32)
    torch.testing.assert_close(found(TOKENS).logits, as_model(drafter)(TOKENS).logits)
    names = {one.name for one in gguf.GGUFReader(file).tensors}
    assert ("output.weight" in names) != tied
    assert field(file, "tokenizer.ggml.tokens")[:2] == ["<0>", "<1>"]
    assert "--spec-type draft-simple" in (tmp_path / "out" / "README.md").read_text()


# transformers' reader takes a head for hidden size / heads wide in Qwen 2, for 128 wide in Qwen 3.
@pytest.mark.parametrize("config", [Qwen2Config(**{**SHAPE, "head_dim": 8}),
                                    Qwen3Config(**{**SHAPE, "head_dim": 128}, tie_word_embeddings=True)])
def test_other_architectures_read_back_as_they_were(tmp_path: Path, config: Any) -> None:
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    write_model(tmp_path / GGUF_FILE, model, write_vocabulary(tmp_path / "target.gguf", 100))
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=GGUF_FILE, dtype=torch.float32)
    names = {one.name for one in gguf.GGUFReader(tmp_path / GGUF_FILE).tensors}
    assert ("blk.1.attn_q.bias" in names, "blk.1.attn_q_norm.weight" in names) == (
        config.model_type == "qwen2", config.model_type == "qwen3")
    torch.testing.assert_close(found(TOKENS).logits, model(TOKENS).logits)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
LENGTHENED = {**YARN, "attention_factor": 1.5, "beta_fast": 16.0}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [2.0] * 4}
TIMES = {"linear": 1.0, "llama3": 1.0, "yarn": 1.0 + 0.1 * math.log(8)}
"""Factor of the rotated queries and keys by kind, where no other is stated."""


def rotation_of(file: Path, architecture: str, size: int, base: float) -> tuple[torch.Tensor, float]:
    """(frequencies, factor of queries and keys) that llama.cpp takes from factors in a file."""
    reader = gguf.GGUFReader(file)
    tensors = {one.name: torch.from_numpy(one.data.copy()) for one in reader.tensors}
    plain = base ** (-torch.arange(size) / size)
    factors = tensors.get("rope_freqs.weight", torch.ones(size))
    key = f"{architecture}.rope.scaling.attn_factor"
    assert f"{architecture}.rope.scaling.type" not in reader.fields, "llama.cpp would scale once more"
    return plain / factors, reader.fields[key].contents() if key in reader.fields else 1.0


@pytest.mark.parametrize("scaled", [LLAMA3, LINEAR, YARN, LENGTHENED])
def test_a_llamas_scaled_rotary_embedding_is_written_as_factors(tmp_path: Path, scaled: dict[str, Any]) -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=scaled))
    write_model(tmp_path / GGUF_FILE, model, write_vocabulary(tmp_path / "target.gguf", 100))
    found, length = rotation_of(tmp_path / GGUF_FILE, "llama", 8, 500.0)
    torch.testing.assert_close(found, model.model.rotary_emb.inv_freq)
    assert not torch.allclose(found, 500.0 ** (-torch.arange(8) / 8))
    assert length == pytest.approx(scaled.get("attention_factor", TIMES[scaled["rope_type"]]))


@pytest.mark.parametrize("scaled", [LLAMA3, LINEAR, YARN, LENGTHENED, LONGROPE])
def test_eagle_3_takes_its_targets_scaling_to_llama_cpp(tmp_path: Path, target: Target, scaled: dict[str, Any]) -> None:
    said = Eagle3.create(Eagle3Config(taps=(1, 2, 4)), target).describe()
    kept = {name: value for name, value in scaled.items() if name != "rope_theta"}
    said["block"]["rope_scaling"] = {"original_max_position_embeddings": target.context_length, **kept}
    drafter = Eagle3.rebuild(said, target.identity)
    drafter.bind(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(0.1)
    block = drafter.block
    found, length = rotation_of(exported(drafter, target, tmp_path), "eagle3", block.head_dim // 2, block.rope_base)
    cosine, _ = rotation(torch.tensor([[0, 1]]), block.rope_base, block.head_dim, block.rope_scaling)
    torch.testing.assert_close(length * torch.cos(found), cosine[0, 0, 1, : block.head_dim // 2])
    torch.testing.assert_close(torch.tensor(length), cosine[0, 0, 0, 0])
    assert not torch.allclose(found, block.rope_base ** (-torch.arange(len(found)) / len(found)))


@pytest.mark.parametrize(("scaled", "keys"), [
    (LINEAR, {"type": "linear", "factor": 4.0}),
    (YARN, {"type": "yarn", "factor": 8.0, "original_context_length": 64}),
    ({**YARN, "attention_factor": 1.5},
     {"type": "yarn", "factor": 8.0, "original_context_length": 64, "attn_factor": 1.5 / TIMES["yarn"]}),
])
def test_architectures_without_factors_have_keys(tmp_path: Path, scaled: dict[str, Any], keys: dict[str, Any]) -> None:
    model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**{**SHAPE, "head_dim": 8}, rope_parameters=scaled))
    write_model(tmp_path / GGUF_FILE, model, write_vocabulary(tmp_path / "target.gguf", 100))
    reader, start = gguf.GGUFReader(tmp_path / GGUF_FILE), "qwen2.rope.scaling."
    assert {name for name in reader.fields if name.startswith(start)} == {start + key for key in keys}
    for key, value in keys.items():
        found = field(tmp_path / GGUF_FILE, start + key)
        assert found == (value if isinstance(value, str) else pytest.approx(value))
    assert "rope_freqs.weight" not in {one.name for one in reader.tensors}


@pytest.mark.parametrize("settings", [{"vocabulary_size": len(IDS)}, {}, {"hidden_size": 48},
                                      {"norm_before_fc": True, "norm_before_residual": True}])
def test_eagle_3_under_the_names_of_llama_cpp(tmp_path: Path, target: Target, settings: dict[str, Any]) -> None:
    reduced = "vocabulary_size" in settings
    drafter = Eagle3.create(Eagle3Config(taps=(1, 2, 4), **settings), target, IDS if reduced else None)
    file = exported(drafter, target, tmp_path)
    read = {one.name: torch.from_numpy(one.data.copy()) for one in gguf.GGUFReader(file).tensors}
    own = drafter.state_dict()
    # hidden_states[v] is the output of layer v - 1.
    assert field(file, "eagle3.target_layers") == [2, 3, 5]
    assert field(file, "eagle3.target_hidden_size") == 32
    assert field(file, "eagle3.norm_before_residual") == bool(settings.get("norm_before_residual"))
    assert ("d2t" in read, "token_embd.weight" in read, "enc.output_norm.weight" in read) == (
        reduced, "hidden_size" in settings, "norm_before_fc" in settings)
    if reduced:
        assert read["d2t"].tolist() == IDS.tolist()
    assert len(read["output.weight"]) == (len(IDS) if reduced else 100)
    torch.testing.assert_close(read["blk.0.attn_norm_2.weight"], own["midlayer.hidden_norm.weight"])
    torch.testing.assert_close(read["blk.0.attn_norm.weight"], own["midlayer.input_layernorm.weight"])
    # llama.cpp rotates numbers 2i and 2i + 1 of a head, transformers i and i + half.
    heads_first = own["midlayer.self_attn.q_proj.weight"].unflatten(0, (drafter.block.num_heads, 2, -1))
    found = read["blk.0.attn_q.weight"].unflatten(0, (drafter.block.num_heads, -1, 2)).transpose(1, 2)
    torch.testing.assert_close(found, heads_first)
    assert "--spec-type draft-eagle3" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("settings", "named", "layouts"), [
    ({"num_layers": 2}, "2 layers", {"gguf", "openvino"}), ({"taps": (1, 4)}, "2 tapped layers", {"gguf", "openvino"}),
    ({"fc_norm": True}, "fc_norm", {"gguf", "openvino"}), ({"norm_output": True}, "norm_output", {"gguf", "openvino"}),
    ({"hidden_size": 48}, "the width 48 for states 32 wide", {"openvino"}),
    ({"norm_before_fc": True}, "norm_before_fc", {"openvino"}),
    ({"norm_before_residual": True}, "norm_before_residual", {"openvino"}),
])
def test_eagle_3_that_an_engine_does_not_run_is_refused(
    tmp_path: Path, target: Target, settings: dict[str, Any], named: str, layouts: set[str]
) -> None:
    drafter = Eagle3.create(Eagle3Config(**{"taps": (1, 2, 4), **settings}), target)
    for layout in layouts:
        with pytest.raises(UserError, match=f"this drafter has {named}; train another, or choose --format eagle, "):
            written(drafter, target, layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("config", "settings", "named"), [
    (LlamaConfig, {"hidden_act": "gelu"}, "activated by gelu.*"),
    (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}},
     "rotated by dynamic.*"),
    (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
     "rotated in part"),
    (Qwen2Config, {"head_dim": 8, "rope_parameters": LLAMA3},
     r"rotated by llama3, which llama\.cpp has not for qwen2 \(it has default, linear, yarn\)"),
    (Qwen2Config, {"head_dim": 8, "rope_parameters": LENGTHENED},
     r"rotated by yarn with beta_fast 16\.0, for which llama\.cpp has no place in qwen2"),
    (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
     "attending within a window"),
])
def test_a_model_that_llama_cpp_cannot_hold_is_refused(tmp_path: Path, config: Any, settings: dict[str, Any],
                                                       named: str) -> None:
    model = AutoModelForCausalLM.from_config(config(**SHAPE | settings))
    with pytest.raises(UserError, match=f"no draft language model {named}; export it with --format huggingface and "
                                        r"convert that folder with llama\.cpp's convert_hf_to_gguf\.py"):
        write_model(tmp_path / GGUF_FILE, model, write_vocabulary(tmp_path / "target.gguf", 100))
    assert not (tmp_path / GGUF_FILE).exists()


def test_a_tokenizer_is_needed(tmp_path: Path, target: Target) -> None:
    drafter = DraftLM.create(DraftLMConfig(num_layers=1), target)
    none = tmp_path / "none.gguf"
    none.write_bytes(b"GGUF" + bytes(40))
    other = write_vocabulary(tmp_path / "other.gguf", 99)
    for file, reason in ((None, r"serves tiny-target; give it with --target_gguf FILE"),
                         (tmp_path / "missing.gguf", "is no GGUF file with a tokenizer"),
                         (none, "is no GGUF file with a tokenizer; give that of the target"),
                         (other, "has 99 tokens, but tiny-target has 100; give the GGUF file of this target")):
        with pytest.raises(UserError, match=reason):
            written(drafter, target, "gguf", tmp_path / "out", ExportSettings(target_gguf=file))
    with pytest.raises(UserError, match="the format gguf holds draft language models, EAGLE-3 drafters and "
                                        "drafters of blocks, this artifact is medusa"):
        written(heads(target), target, "gguf", tmp_path / "out", ExportSettings(target_gguf=other))
    assert not (tmp_path / "out").exists()


def test_the_gguf_file_of_a_target(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "target.gguf", 10)
    assert gguf_of(TargetConfig(name=str(file))) == file
    assert gguf_of(TargetConfig(name="tiny-random")) is None
    assert gguf_of(TargetConfig()) == find_default_gguf()


# OpenVINO GenAI -------------------------------------------------------------------------------------------------------


TOLD = """#!{python}
import json, os, shutil, sys
from pathlib import Path
job = json.loads(Path(sys.argv[2]).read_text())
source = Path(job["source"])
shutil.copytree(source, {copy!r})
Path({log!r}).write_text(json.dumps({{**job, "script": sys.argv[1], "safe": os.environ["PYTHONSAFEPATH"]}}))
Path(job["out"], "openvino_model.xml").write_text("<model/>")
Path(sys.argv[3]).write_text("{{}}")
"""


def conversion(drafter: Drafter, target: Target, folder: Path) -> dict[str, Any]:
    """The job that the conversion was given; a copy of its source is in `folder/source`."""
    program = folder / "python"
    program.write_text(TOLD.format(python=sys.executable, log=str(folder / "log"), copy=str(folder / "source")))
    program.chmod(0o755)
    written(drafter, target, "openvino", folder / "out", ExportSettings(convert_with=program))
    found: dict[str, Any] = json.loads((folder / "log").read_text())
    return found


def test_eagle_3_is_converted_with_its_layers(tmp_path: Path, target: Target) -> None:
    job = conversion(Eagle3.create(Eagle3Config(taps=(1, 2, 4)), target), target, tmp_path)
    assert job["layers"] == [1, 2, 4]
    assert (Path(job["script"]).name, job["engine"]) == ("engine_jobs.py", "optimum-intel")
    # A file next to the script has the name of a package that the script imports.
    assert job["safe"] == "1"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".draftsmith.json", "README.md", "acceptance.json", "origin.json", "openvino_model.xml"}


@pytest.mark.parametrize("size", [None, len(IDS)])
def test_the_conversion_is_given_the_token_of_every_entry(tmp_path: Path, target: Target, size: int | None) -> None:
    config = Eagle3Config(taps=(1, 2, 4), vocabulary_size=size)
    conversion(Eagle3.create(config, target, None if size is None else IDS), target, tmp_path)
    held = load_file(tmp_path / "source" / "model.safetensors")
    tokens = torch.arange(target.vocab_size) if size is None else IDS
    assert (held["d2t"] + torch.arange(len(tokens))).tolist() == tokens.tolist()
    assert len(held["lm_head.weight"]) == len(tokens)


def test_a_draft_model_is_converted_with_its_tokenizer(tmp_path: Path, target: Target) -> None:
    job = conversion(DraftLM.create(DraftLMConfig(num_layers=1), target), target, tmp_path)
    assert job["layers"] is None
    names = {path.name for path in (tmp_path / "source").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "openvino_genai.draft_model" in (tmp_path / "out" / "README.md").read_text()


def test_an_interpreter_is_needed(tmp_path: Path, target: Target) -> None:
    drafter = DraftLM.create(DraftLMConfig(num_layers=1), target)
    with pytest.raises(UserError, match="give its interpreter with --convert_with PYTHON"):
        written(drafter, target, "openvino", tmp_path / "out")
    with pytest.raises(UserError, match=r"none does not start \(No such file or directory\); give the bin/python of an "
                                        "environment with optimum-intel"):
        written(drafter, target, "openvino", tmp_path / "out", ExportSettings(convert_with=Path("none")))
    with pytest.raises(UserError, match="holds draft language models, EAGLE-3 drafters and DFlash drafters"):
        written(heads(target), target, "openvino", tmp_path / "out")
    assert not (tmp_path / "out").exists()
