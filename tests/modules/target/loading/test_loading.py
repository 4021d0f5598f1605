"""Loading a target again in another number format, and GGUF files that are parsed once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.modules import TargetConfig, load_target
from draftsmith.modules.target.loading import loading, stored_weights
from draftsmith.modules.target.loading.loading import load_in_format
from draftsmith.modules.target.loading.stored_weights import gguf_config, parsed_once
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging


def saved(folder: Path, *, tied: bool) -> TargetConfig:
    """Settings of a tiny target that stands in a folder."""
    model = tiny_model()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return TargetConfig(name=str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_a_cast_target_is_the_one_that_is_read_in_that_format(tied: bool, tmp_path: Path) -> None:
    config = saved(tmp_path, tied=tied)
    loaded = load_target(config)
    before = loaded.identity.weights_hash, loaded.dtype
    cast = load_in_format(config, loaded, torch.bfloat16)
    read = load_target(TargetConfig(name=str(tmp_path), dtype="bfloat16", device="cpu"))
    assert cast.identity == read.identity
    assert cast.model.config.to_dict() == read.model.config.to_dict()
    for found, wanted in ((dict(cast.model.named_parameters()), dict(read.model.named_parameters())),
                          (dict(cast.model.named_buffers()), dict(read.model.named_buffers()))):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
    assert (cast.model.get_output_embeddings().weight is cast.model.get_input_embeddings().weight) == tied
    assert before == (loaded.identity.weights_hash, loaded.dtype)


def kept_module(model: Any) -> None:
    model._keep_in_fp32_modules = ["norm"]


def one_weight_of_its_own(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.double()


def saved_buffer(model: Any) -> None:
    model.model.register_buffer("scale", torch.ones(3))


@pytest.mark.parametrize("change", [kept_module, one_weight_of_its_own, saved_buffer])
def test_a_model_with_values_in_a_format_of_their_own_is_read_again(change: Any, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved(tmp_path, tied=False)
    loaded = load_target(config)
    change(loaded.model)
    asked = []
    monkeypatch.setattr(loading, "load_target", asked.append)
    load_in_format(config, loaded, torch.bfloat16)
    assert asked == [TargetConfig(name=str(tmp_path), dtype="bfloat16", device="cpu")]


def test_a_gguf_file_is_parsed_once_and_the_library_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    made: list[str] = []

    def reader(path: str) -> SimpleNamespace:
        made.append(path)
        return SimpleNamespace(path=path)

    monkeypatch.setattr(gguf, "GGUFReader", reader)
    names = gguf.get_tensor_name_map
    with parsed_once():
        assert gguf.GGUFReader("a") is gguf.GGUFReader("a")
        assert gguf.GGUFReader("b").path == "b"
        architecture = gguf.MODEL_ARCH.LLAMA
        assert gguf.get_tensor_name_map(architecture, 2) is gguf.get_tensor_name_map(architecture, 2)
    assert made == ["a", "b"]
    assert gguf.GGUFReader is reader
    assert gguf.get_tensor_name_map is names


def test_the_configuration_of_a_gguf_file_is_read_again_when_the_file_changed(tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    asked: list[str] = []

    def read(folder: Path, *, gguf_file: str, trust_remote_code: bool) -> SimpleNamespace:
        asked.append(gguf_file)
        return SimpleNamespace(text=(folder / gguf_file).read_text(), layers=[])

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)
    stored_weights._config.cache_clear()
    file = tmp_path / "model.gguf"
    file.write_text("one")
    first = gguf_config(file)
    first.layers.append("changed by its owner")
    assert gguf_config(file).layers == []
    assert len(asked) == 1
    file.write_text("another")
    assert gguf_config(file).text == "another"
    assert len(asked) == 2


def test_loading_is_quiet_and_bars_stay_as_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = saved(tmp_path, tied=False)
    capfd.readouterr()
    load_target(config)
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled()
    assert not are_progress_bars_disabled()
