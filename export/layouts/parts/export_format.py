"""Export format: a layout of another project with all that commands, trials and tables know of it.

A layout's file defines its object next to its writer; `registry.py` lists the objects."""

import json
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field
from torch import Tensor

from ....modules import Drafter, Target
from ....modules.policies.registry import MOST
from ....modules.target.loading.loading import DEFAULT_NAME, is_local
from ....modules.target.loading.tiny_model import TINY_NAME
from ...artifact import Artifact, portable
from ...engine_settings import DraftSettings
from .checkpoint import WHOLE, Checkpoint, Contents
from .gguf_file import FLOAT32

D = TypeVar("D", bound=Drafter)
Engine = Literal["vLLM", "SGLang", "llama.cpp", "OpenVINO GenAI", "TensorRT-LLM", "Text Generation Inference",
                 "transformers"]
"""Serving engines, and what decodes with drafts too."""
Project = Literal["the official code", "the speculators library", "TokenSpeed"]
"""Code of those who made a method or a layout, or read one that no engine here does."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of single formats, beyond the artifact and its target."""

    target_gguf: Path | None = None
    """With gguf, the target's GGUF file, whose tokenizer is copied."""
    convert_with: Path | None = None
    """With openvino, the interpreter of an environment with optimum-intel."""
    weights: str = FLOAT32
    """Number format of the matrices, one of the format's `weights`."""
    drafts: DraftSettings = field(default_factory=DraftSettings)
    """Numbers of tokens in the commands and settings that serve it."""


PLAIN = ExportSettings()  # The weights as they were trained, and nothing that single formats ask for


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Values that a checkpoint may leave open; None takes the checkpoint's own, and is refused where it has none."""

    taps: tuple[int, ...] | None = None
    """With eagle, speculators and dflash, the layers of the target, from 0, whose outputs the drafter reads."""
    rope_base: Annotated[float, Field(ge=1, le=1e9)] | None = None
    """With eagle and speculators, the base of EAGLE's rotary embedding."""
    aligned: Literal["next", "same"] | None = None
    """With dflash and speculators, the token that a slot of a block predicts: the one after its own position (DSpark),
    or the one at it (DFlash)."""
    causal: bool | None = None
    """With dflash and speculators, whether a slot sees those before it alone."""
    exit_layer: int | None = None
    """With kangaroo, the number of the target's layers before the adapter."""
    depths: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """With huggingface, the tokens that a draft with mask tokens guesses in a pass."""


READ = ImportSettings()  # Every value as the checkpoint has it


@dataclass(frozen=True, kw_only=True)
class Places:
    """Paths in the commands that serve an export; by default those of its README.md, which are typed in its folder."""

    folder: str = "."  # The exported folder
    target: str = "../target"  # The target: a folder that the format `target` writes, or a name on the Hub
    gguf: str = "../target.gguf"  # The target's GGUF file
    on_hub: bool = False  # Whether the target is a name on the Hub
    drafts: DraftSettings = field(default_factory=DraftSettings)  # Numbers of tokens to draft
    merged: str = "../target"  # The folder that the format `target` writes
    adapter: str = ""  # The folder of the target's adapter; empty without one
    rank: int = 0  # Its rank where engines add it to a base; 0 where they need both merged

    @property
    def added(self) -> bool:
        """True where `target` is the base, to which vLLM and SGLang add the adapter."""
        return self.rank > 0 and self.target != self.merged

    def adapted(self, target: Target, adapter: str) -> "Places":
        """The places of a target with an adapter, in this folder."""
        if target.adapter is None:
            return self
        found = replace(self, adapter=adapter, rank=target.adapter.rank)
        return found if found.rank else replace(found, target=self.merged, on_hub=False, gguf=Places.gguf)

    def said(self, commands: Collection[str]) -> list[str]:
        """Sentences on how the engines of `commands` serve a target with an adapter."""
        said = [f"Ask vLLM for the model `{ADAPTED}` and SGLang for `{self.target}:{ADAPTED}`: the base alone answers "
                f"to other names, and less of that is accepted. The adapter is `{self.adapter}`." if self.added else
                f"`{self.merged}` holds base and adapter merged, so that no engine has to add it."]
        gguf = (f"`{self.adapter}.gguf` is the adapter as llama.cpp's `convert_lora_to_gguf.py` writes it."
                if self.rank else f"llama.cpp adds no adapter of this kind: `{self.gguf}` has to be `{self.merged}` as "
                "its `convert_hf_to_gguf.py` writes it.")
        return [] if not self.adapter else [gguf] if "llama.cpp" in commands else said


def target_name(target: Target) -> str:
    """The target for a configuration that names one: its name, or the folder that base and adapter are merged in."""
    return Places.merged if target.adapter else str(portable(target.identity.name))


def hub_name(name: str) -> str | None:
    """The name of a target on the Hub; None where its folder is written by the format `target`. The embedded one is not
    the Hub's of that name, whose weights are not rounded."""
    return None if is_local(name) or name in (DEFAULT_NAME, TINY_NAME) else name


ADAPTED = "adapted"  # Name of the target's adapter in an engine
VLLM = ("vllm", "serve")
VLLM_ON_CPU = ("VLLM_CPU_KVCACHE_SPACE=4", "python", "-m", "vllm.entrypoints.openai.api_server", "--dtype", FLOAT32,
               "--model")
"""Starts of the commands. The wheel for CPUs has no command `vllm`, and asks for nine tenths of the memory without the
variable."""
ON_CPU = "vLLM on a CPU"
WRONG_SAMPLES = ("With a draft, vLLM 0.32 on a CPU gives wrong answers to every request whose temperature is above 0: "
                 "send `temperature=0` there. Its code for GPUs is another.")
"""On the CPU, vLLM's sampler reads a temperature of drafted tokens that was never set (`utils/cpu_triton_utils.py`)."""


def vllm_commands(model: str, *options: str) -> dict[str, str]:
    """Commands of vLLM's server for OpenAI's clients: on a GPU in the number format that vLLM chooses, on a CPU in
    float32, in which drafts change the fewest answers."""
    return {"vLLM": shlex.join([*VLLM, model, *options]), ON_CPU: shlex.join([*VLLM_ON_CPU, model, *options])}


@dataclass(frozen=True, kw_only=True)
class Served:
    """vLLM's settings for drafting with an exported folder."""

    method: dict[str, Any]  # vLLM's configuration of drafts, without the folder and the number of tokens
    loader: dict[str, Any]  # Extra settings for loading
    names_target: bool = False
    """Whether the folder can be served as a model of its own, whose configuration names a target on the Hub."""

    def commands(self, places: Places, chain: int) -> dict[str, str]:
        """The commands of vLLM's server, for a chain of so many tokens."""
        if self.names_target and places.on_hub and not places.added and not places.drafts.tokens:
            return vllm_commands(places.folder)
        drafts = {**self.method, "model": places.folder, **places.drafts.vllm(chain)}
        loader = ["--model-loader-extra-config", json.dumps(self.loader)] if self.loader else []
        # There is room for adapters of the ranks 8, 16, 32 and so on.
        room = str(max(8, 2 ** (places.rank - 1).bit_length()))
        adapter = ["--enable-lora", "--max-lora-rank", room, "--lora-modules", f"{ADAPTED}={places.adapter}"]
        return vllm_commands(places.target, "--speculative-config", json.dumps(drafts), *loader,
                             *(adapter if places.added else []))


Writer = Callable[[D, Target, Path, ExportSettings], Contents]
"""Writes the files of a drafter, bound to its target, but README.md into an empty folder, and describes them."""
ArtifactWriter = Callable[[Artifact, Path, ExportSettings], Contents]  # Writer of another part of an artifact

Reader = Callable[[Checkpoint, Target, ImportSettings], tuple[D, dict[str, Tensor]]]
"""Reader of a checkpoint: a drafter of its shape, and the weights for it. Raises UserError for what is left open."""


@dataclass(frozen=True, kw_only=True)
class ExportFormat(Generic[D]):
    """A layout: the drafters it takes, its writers and its reader, and the way that engines read it."""

    name: str  # Name on the command line
    content: str = ""  # The drafters it holds, in the plural
    readers: Mapping[Engine | Project, str] = field(default_factory=dict)
    """Programs that load its folders, at least those of some drafters, each with what is to be said of it."""
    passed_over: Callable[[D], Collection[str]] = lambda drafter: ()  # Programs among these that do not load it
    families: tuple[type[D], ...] = ()  # Their classes
    refusal: Callable[[D, Target], str] = lambda drafter, target: ""
    """The setting of a drafter that the layout cannot hold, with the remedy, in a sentence; empty where it holds it."""
    write: Writer[D] | None = None  # Writer of a drafter without a refusal; None where it holds none
    write_adapted: ArtifactWriter | None = None  # Writer of an artifact that changes its target; None for none
    write_target: ArtifactWriter | None = None  # Writer of the target of any other artifact; None where it holds none
    read: Reader[D] | None = None  # Reader of a drafter; None where nothing is imported
    opens: tuple[str, ...] = ()  # The fields of `ImportSettings` that its checkpoints may leave open
    known: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that are fixed in the implementation, with the values that a configuration may give them."""
    config_file: str = "config.json"  # The file of the configuration
    in_target: bool = False  # Whether its checkpoints are in the target's folder, the default of an import then
    bare: bool = False  # Whether the tensors say everything, so that a checkpoint without a configuration is read too
    option: str = ""  # The field of `ExportSettings` that is for this format alone
    file: str = WHOLE  # The file of weights
    weights: tuple[str, ...] = ()  # Number formats of matrices; empty where they stay as they were trained
    as_read: Callable[[Tensor, str, bool], Tensor] = lambda weight, weights, linear: weight
    """A weight as an engine reads it: from the trained one, a number format, and whether it is the matrix of a linear
    layer that is no embedding too."""
    vllm: Callable[[D], Served | None] = lambda drafter: None  # vLLM's settings; None where vLLM does not read it
    others: Callable[[D, Places], Mapping[str, str]] = lambda drafter, places: {}  # Other engines' commands
    lost: Callable[[D], str] = lambda drafter: ""
    """A sentence on the part of the drafter that an engine leaves out; empty where there is none."""

    def warning(self, drafter: Drafter) -> str:
        """The sentence of `lost` for a drafter of any family."""
        return self.lost(drafter) if isinstance(drafter, self.families) else ""

    def read_by(self, drafter: D) -> str:
        """The programs that load this drafter, for tables and documents."""
        unable = self.passed_over(drafter)
        return ", ".join(name + said for name, said in self.readers.items() if name not in unable)

    def commands(self, drafter: D, places: Places) -> dict[str, str]:
        """The commands that serve the folder, by engine."""
        first = served.commands(places, places.drafts.chain(drafter)) if (served := self.vllm(drafter)) else {}
        return {**first, **self.others(drafter, places)}
