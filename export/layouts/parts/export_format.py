"""Export format: a layout of another project with all that commands, trials and tables know of it.

A layout's file defines its object next to its writer; `registry.py` lists the objects.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from ....modules import Drafter, Target
from ...artifact import Artifact
from .gguf_file import FLOAT32
from .layout_folder import Contents

D = TypeVar("D", bound=Drafter)


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of single formats, beyond the artifact and its target."""

    target_gguf: Path | None = None
    """With gguf, the target's GGUF file, whose tokenizer is copied."""
    convert_with: Path | None = None
    """With openvino, the interpreter of an environment with optimum-intel."""
    temperature: float | None = None
    """With specdec, the temperature whose acceptance head is written; None takes the only one."""
    weights: str = FLOAT32
    """Number format of the matrices, one of the format's `weights`."""


PLAIN = ExportSettings()
"""The weights as they were trained, and nothing that single formats ask for."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Paths in the commands that serve an export; by default those of its README.md, which are typed in its folder."""

    folder: str = "."
    """The exported folder."""
    target: str = "../target"
    """The target: a folder that the format `target` writes, or a name on the Hub."""
    gguf: str = "../target.gguf"
    """The target's GGUF file."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """vLLM's settings for drafting with an exported folder."""

    method: dict[str, Any]
    """vLLM's configuration of drafts, without the folder and the number of tokens."""
    loader: dict[str, Any]
    """Extra settings for loading."""
    tokens: int = 3
    """Tokens of a draft."""

    def command(self, places: Places) -> str:
        """The command of vLLM's server."""
        drafts = {**self.method, "model": places.folder, "num_speculative_tokens": self.tokens}
        loader = ["--model-loader-extra-config", json.dumps(self.loader)] if self.loader else []
        return vllm_command(places.target, "--speculative-config", json.dumps(drafts), *loader)


VLLM = ("VLLM_CPU_KVCACHE_SPACE=4", "python", "-m", "vllm.entrypoints.openai.api_server", "--model")
"""Start of the command. On a CPU, where alone the variable matters, vLLM would ask for nine tenths of the memory."""


def vllm_command(model: str, *options: str) -> str:
    """vLLM's server for OpenAI's clients, in the number format in which drafts change the fewest answers. Its module is
    called, since the wheel for CPUs has no command `vllm`."""
    return shlex.join([*VLLM, model, "--dtype", FLOAT32, *options])



Writer = Callable[[D, Target, Path, ExportSettings], Contents]
"""Writes the files of a drafter, bound to its target, but README.md into an empty folder, and describes them."""
ArtifactWriter = Callable[[Artifact, Path, ExportSettings], Contents]
"""Writer of another part of an artifact."""


@dataclass(frozen=True, kw_only=True)
class ExportFormat(Generic[D]):
    """A layout: the drafters it takes, its writers, and the way that engines read it."""

    name: str
    """Name on the command line."""
    content: str = ""
    """The drafters it holds, in the plural."""
    readers: str = ""
    """Programs that read it, for the documents of other formats."""
    families: tuple[type[D], ...] = ()
    """Their classes."""
    refusal: Callable[[D, Target], str] = lambda drafter, target: ""
    """The setting of a drafter that the layout cannot hold, with the remedy, in a sentence; empty where it holds it."""
    write: Writer[D] | None = None
    """Writer of a drafter without a refusal; None where it holds none."""
    write_adapted: ArtifactWriter | None = None
    """Writer of an artifact that changes its target; None where it cannot hold one."""
    write_target: ArtifactWriter | None = None
    """Writer of the target of an artifact that leaves it unchanged; None where it holds none."""
    write_head: ArtifactWriter | None = None
    """Writer of an acceptance head; None where it holds none. Raises UserError for an artifact without that head."""
    option: str = ""
    """The field of `ExportSettings` that is for this format alone."""
    file: str = "model.safetensors"
    """The file of weights."""
    weights: tuple[str, ...] = ()
    """Number formats of matrices; empty where they stay as they were trained."""
    as_read: Callable[[Tensor, str, bool], Tensor] = lambda weight, weights, linear: weight
    """A weight as an engine reads it: from the trained one, a number format, and whether it is the matrix of a linear
    layer that is no embedding too."""
    vllm: Callable[[D], Served] | None = None
    """vLLM's settings for the folder; None where vLLM does not read it."""
    others: Callable[[D, Places], Mapping[str, str]] = lambda drafter, places: {}
    """Commands of other engines that serve the folder, by engine."""
    lost: Callable[[D], str] = lambda drafter: ""
    """A sentence on the part of the drafter that an engine leaves out; empty where there is none."""

    def warning(self, drafter: Drafter) -> str:
        """The sentence of `lost` for a drafter of any family."""
        return self.lost(drafter) if isinstance(drafter, self.families) else ""

    def commands(self, drafter: D, places: Places) -> dict[str, str]:
        """The commands that serve the folder, by engine."""
        first = {} if self.vllm is None else {"vLLM": self.vllm(drafter).command(places)}
        return {**first, **self.others(drafter, places)}
