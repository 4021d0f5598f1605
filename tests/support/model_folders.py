"""Target folders of the tiny random model with a changed configuration or further files."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.faults import Place

CODE = ("from transformers import LlamaConfig, LlamaForCausalLM\nopen('ran', 'w')\n"
        "class C(LlamaConfig):\n    model_type = 'own'\nclass M(LlamaForCausalLM):\n    config_class = C\n")
"""Code of a model, which leaves a file when it runs."""
AUTO_MAP = {"AutoConfig": "own_code.C", "AutoModelForCausalLM": "own_code.M"}  # The entry of config.json that names it


@cache
def tiny_files() -> dict[str, bytes]:
    """The files of the tiny random model in the layout of Hugging Face."""
    with TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def write_model(place: Place, files: dict[str, str | bytes] | None = None, **changes: Any) -> Path:
    """Write the folder `model` of a case."""
    for name, content in {**tiny_files(), **(files or {})}.items():
        place.write(f"model/{name}", content)
    config = json.loads(tiny_files()["config.json"]) | changes
    if "config.json" not in (files or {}):
        place.write("model/config.json", json.dumps(config))
    return place.folder / "model"


def model(files: dict[str, str | bytes] | None = None, **changes: Any) -> Callable[[Place], Path]:
    """A preparation that writes the folder."""
    return lambda place: write_model(place, files, **changes)


def with_code(**changes: Any) -> Callable[[Place], Path]:
    """A preparation that writes a folder with code of its own."""
    return model({"own_code.py": CODE}, auto_map=AUTO_MAP, **changes)
