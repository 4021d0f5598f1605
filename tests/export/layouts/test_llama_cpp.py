"""The layout of llama.cpp: its files read back by transformers' own reader of GGUF, or tensor by tensor."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from draftsmith.export import ExportSettings
from draftsmith.export.layouts.llama_cpp import GGUF_FILE, write_model
from draftsmith.modules import Drafter, DraftLM, DraftLMConfig, Eagle3, Eagle3Config, Target, TargetConfig, UserError
from draftsmith.modules.drafters.draft_lm import as_model
from draftsmith.modules.target.loading import find_default_gguf, gguf_of
from support.artifacts import heads
from support.families import IDS
from support.gguf_vocabulary import write_vocabulary
from support.targets import six_layers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3Config,
)

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
    drafter = DraftLM.create(DraftLMConfig(num_layers=2, tied=tied), target)
    file = exported(drafter, target, tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=GGUF_FILE, dtype=torch.float32)
    torch.testing.assert_close(found(TOKENS).logits, as_model(drafter, target)(TOKENS).logits)
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


def test_a_scaled_rotary_embedding_is_written_as_factors(tmp_path: Path) -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=scaled))
    write_model(tmp_path / GGUF_FILE, model, write_vocabulary(tmp_path / "target.gguf", 100))
    factors = {one.name: torch.from_numpy(one.data.copy()) for one in gguf.GGUFReader(tmp_path / GGUF_FILE).tensors}[
        "rope_freqs.weight"]
    plain = 500.0 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert (factors[0], factors[-1]) == (1.0, 8.0)


@pytest.mark.parametrize("settings", [{"vocabulary_size": len(IDS)}, {}, {"hidden_size": 48, "target_hidden_size": 32},
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


@pytest.mark.parametrize(("settings", "named"), [
    ({"num_layers": 2}, "2 layers"), ({"taps": (1, 4)}, "2 tapped layers"), ({"fc_norm": True}, "fc_norm"),
    ({"norm_output": True}, "norm_output"),
])
def test_what_llama_cpp_does_not_run_is_refused(
    tmp_path: Path, target: Target, settings: dict[str, Any], named: str
) -> None:
    drafter = Eagle3.create(Eagle3Config(**{"taps": (1, 2, 4), **settings}), target)
    with pytest.raises(UserError, match=f"this drafter has {named}; export it with --format eagle, or train another"):
        exported(drafter, target, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("settings", "named"), [
    ({"hidden_act": "gelu"}, "activated by gelu"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}, "rotated by dynamic"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
     "rotated in part"),
])
def test_a_model_that_is_no_plain_llama_is_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    vocabulary = write_vocabulary(tmp_path / "target.gguf", 100)
    with pytest.raises(UserError, match=f"no draft language model {named}.*convert_hf_to_gguf.py"):
        write_model(tmp_path / GGUF_FILE, LlamaForCausalLM(LlamaConfig(**SHAPE, **settings)), vocabulary)


def test_a_window_is_refused(tmp_path: Path) -> None:
    windows = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(UserError, match="no draft language model attending within a window"):
        write_model(tmp_path / GGUF_FILE, AutoModelForCausalLM.from_config(windows), tmp_path / "target.gguf")


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
    with pytest.raises(UserError, match="the format gguf holds draft language models and EAGLE-3 drafters, this "
                                        "artifact is medusa"):
        written(heads(target), target, "gguf", tmp_path / "out", ExportSettings(target_gguf=other))
    assert not (tmp_path / "out").exists()


def test_the_gguf_file_of_a_target(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "target.gguf", 10)
    assert gguf_of(TargetConfig(name=str(file))) == file
    assert gguf_of(TargetConfig(name="tiny-random")) is None
    assert gguf_of(TargetConfig()) == find_default_gguf()
