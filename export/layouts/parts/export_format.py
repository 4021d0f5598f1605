"""Export format: a layout of another project with all that commands, trials and tables know of it.

A layout's file defines its object next to its writer; `registry.py` lists the objects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from ....modules import Drafter, Target
from ...artifact import Artifact
from .gguf_file import FLOAT32

D = TypeVar("D", bound=Drafter)


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of single formats, beyond the artifact and its target."""

    target_gguf: Path | None = None
    """With gguf, the target's GGUF file, whose tokenizer is copied."""
    convert_with: Path | None = None
    """With openvino, the interpreter of an environment with optimum-intel."""
    weights: str = FLOAT32
    """Number format of the matrices, one of the format's `weights`."""


PLAIN = ExportSettings()
"""The weights as they were trained, and nothing that single formats ask for."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """vLLM's settings for drafting with an exported folder."""

    method: dict[str, Any]
    """vLLM's configuration of drafts, without the folder and the number of tokens."""
    loader: dict[str, Any]
    """Extra settings for loading."""


Writer = Callable[[D, Target, Path, ExportSettings], None]
"""Writes a drafter, bound to its target, to a folder: new, empty, or an earlier export."""


@dataclass(frozen=True, kw_only=True)
class ExportFormat(Generic[D]):
    """A layout: the drafters it takes, its writers, and the way that engines read it."""

    name: str
    """Name on the command line."""
    content: str = ""
    """The drafters it holds, in the plural."""
    families: tuple[type[D], ...] = ()
    """Their classes."""
    write: Writer[D] | None = None
    """Writer of a drafter; None where it holds none. Raises UserError for settings that the layout cannot hold."""
    write_adapted: Callable[[Artifact, Path], None] | None = None
    """Writer of an artifact that changes its target; None where it cannot hold one."""
    write_head: Callable[[Artifact, Path, float | None], Path] | None = None
    """Writer of an acceptance head, by the temperature of its answers; None where it holds none."""
    instead: str = ""
    """End of the refusal of a drafter where there is no `write`."""
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
    lost: Callable[[D], str] = lambda drafter: ""
    """A sentence on the part of the drafter that an engine leaves out; empty where there is none."""
    assistant: bool = False
    """Whether transformers decodes with it as `assistant_model`, as the tests do."""

    def warning(self, drafter: Drafter) -> str:
        """The sentence of `lost` for a drafter of any family."""
        return self.lost(drafter) if isinstance(drafter, self.families) else ""


def without_settings(writer: Callable[[D, Target, Path], None]) -> Writer[D]:
    """The writer of a format to which no setting applies."""
    return lambda drafter, target, out, settings: writer(drafter, target, out)
