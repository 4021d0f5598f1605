"""Placements of a target's weights: whole on one device of each process, split among processes, or spread over the
devices of one process.

Only the decoder's layers are split or spread. Embedding, last norm and output layer stay whole on the device where a
process trains: a drafter borrows them, and its own rows pass through them without a word to other processes. What is
split is read with transformers' `DistributedConfig`, each process its own part.

Shapes: B rows, L positions."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from ...errors import UserError
from ...features import Features
from ...processes import DTYPES, gather_by_layer, local_rank, read_divided, require_deepspeed, zero3_settings
from ..linear_forms import Pack
from ..loading.model_parts import decoder_of, layer_list

PlacementName = Literal["replicated", "tensor_parallel", "fully_sharded", "zero3", "layers", "disk"]  # In a recipe
Encode = Callable[[Features], Features]  # A pass of the target over whole rows


class Placement:
    """The target whole on one device of each process; other placements say what differs. `degree` processes share one
    target, None for all; `offload` keeps the parts of the weights in the machine's memory, for `Zero3` alone."""

    name: ClassVar[str] = "replicated"
    shared: ClassVar[bool] = False  # Whether several processes hold one target: all must take part in each pass
    spread: ClassVar[bool] = False  # Whether layers are no plain tensors on one device, to be packed, copied or moved
    slow: ClassVar[bool] = False  # Whether every pass reads the layers anew, so that an engine answers and gives states

    def __init__(self, degree: int | None = None, *, offload: bool = False) -> None:
        if degree is not None and degree < 1:
            raise UserError(f"target.degree must be at least 1, got {degree}; leave it out to share the target among "
                            "all processes")
        self.degree, self.offload = degree, offload

    def size(self, world: int) -> int:
        """Processes that hold one target together, of `world` that train; UserError if as many cannot."""
        return 1

    def require_fit(self, sketch: Any, world: int, *, gguf: bool) -> None:
        """Refuse a model, of which `sketch` has no values, that cannot be placed so in `world` processes; from a GGUF
        file if `gguf`. Raises UserError."""
        if gguf and (self.shared or self.slow):
            raise UserError(f"a GGUF file is dequantised as a whole by every process, so target.placement {self.name} "
                            "would save no memory; save the model as a Hugging Face folder, or set target.placement: "
                            "replicated")
        if self.spread and (form := getattr(sketch, "quantised_as", "")):
            raise UserError(f"the target's weights are quantised ({form}), and target.placement {self.name} "
                            f"{'splits' if self.shared else 'spreads'} plain ones only; choose the model's unquantised "
                            "weights, or set target.placement: replicated")

    def require_processes(self, world: int) -> None:
        """Refuse several processes where each would spread its own copy over the same devices. Raises UserError."""
        if self.spread and not (self.shared or self.slow) and world > 1:
            raise UserError(f"target.placement {self.name} spreads the target over all devices of one process, but "
                            f"{world} processes train; set train.devices: 1, or target.placement: tensor_parallel")

    def reading(self, sketch: Any, device: torch.device, world: int) -> AbstractContextManager[dict[str, Any]]:
        """A block in which transformers reads the weights to their places, with these options of `from_pretrained`.
        UserError if the device is not one of those that are used."""
        return nullcontext({})

    def settled(self, model: Any, device: torch.device) -> Any:
        """The model that was read, ready for passes."""
        return model if self.spread else model.to(device)

    def pack(self, asked: Pack) -> Pack:
        """The forms of the linear layers that are possible. Raises UserError if others were set."""
        if not self.spread:
            return asked
        if asked not in ("auto", 0):
            raise UserError(f"target.pack {asked} packs whole linear layers for oneDNN, but target.placement "
                            f"{self.name} does not keep them whole on one CPU; set target.pack: auto")
        return 0

    def own_states(self, encode: Encode, features: Features) -> Features:
        """This process's rows with the target's states, where each process has rows of its own. All processes that
        share the target must call it equally often."""
        return encode(features)


class _Shared(Placement):
    """One target that several processes hold together."""

    shared, spread = True, True

    def size(self, world: int) -> int:
        size = world if self.degree is None else self.degree
        if world == 1:
            raise UserError(f"target.placement {self.name} shares one target among several processes, but this is one; "
                            "start draftsmith train with torchrun --nproc-per-node, or with --target.placement layers "
                            "spread the target over the devices of one process")
        if size < 2 or world % size:
            divisor = next(count for count in range(2, world + 1) if world % count == 0)
            raise UserError(f"target.degree {size} does not divide the {world} processes of this run into groups of at "
                            f"least 2; set it to a divisor of {world}, such as {divisor}, or start another "
                            "number of processes")
        return size

    def require_fit(self, sketch: Any, world: int, *, gguf: bool) -> None:
        self.size(world)  # Refuses numbers of processes that cannot share it, before its files are looked at
        super().require_fit(sketch, world, gguf=gguf)

    def settled(self, model: Any, device: torch.device) -> Any:
        """The model as it is, its configuration again that of a whole one: models are made of it."""
        del model.config.distributed_config
        return model

    def require_accelerator(self, device: torch.device) -> None:
        """Refuse a device other than the machine's accelerator, on which transformers splits weights."""
        found = torch.accelerator.current_accelerator()
        kind = "cpu" if found is None or not torch.accelerator.is_available() else found.type
        if device.type != kind:
            raise UserError(f"target.device {device.type!r} was asked for, but target.placement {self.name} splits the "
                            f"target on this machine's {kind}; set target.device: auto")


class TensorParallel(_Shared):
    """Every layer's heads and channels divided among the processes of a group, which read the same rows together."""

    name = "tensor_parallel"
    group: Any  # The processes that share one target

    def require_fit(self, sketch: Any, world: int, *, gguf: bool) -> None:
        super().require_fit(sketch, world, gguf=gguf)
        size, config = self.size(world), sketch.config.get_text_config()
        for field in ("num_attention_heads", "num_key_value_heads"):
            heads = config.to_dict().get(config.attribute_map.get(field, field))
            if heads is not None and heads % size:
                raise UserError(f"target.degree {size} does not divide {field} {heads} of the target; set it to a "
                                "divisor of both, or set target.placement: fully_sharded")
        if not any(name.startswith(f"{_layers_name(sketch)}.") for name in sketch.tp_plan):
            raise UserError(f"transformers has no plan by which {type(sketch).__name__} is divided for tensor "
                            "parallelism; set target.placement: fully_sharded")

    @contextmanager
    def reading(self, sketch: Any, device: torch.device, world: int) -> Iterator[dict[str, Any]]:
        from transformers.distributed.configuration_utils import DistributedConfig

        self.require_accelerator(device)
        size, inside = self.size(world), f"{_layers_name(sketch)}."
        whole = {name: "replicate" for name in sketch.tp_plan if not name.startswith(inside)}
        config = DistributedConfig(tp_size=size, tp_plan=whole)
        with _groups(world // size) if size < world else nullcontext():
            yield {"distributed_config": config}

    def settled(self, model: Any, device: torch.device) -> Any:
        self.group = model._device_mesh["tp"].get_group()
        return super().settled(model, device)

    def own_states(self, encode: Encode, features: Features) -> Features:
        # The rows of each process of the group in turn, read by all of them; each keeps its own states.
        own, own_rank, tokens_BL = features, dist.get_rank(), features.tokens_BL
        # A broadcast needs to know the size of what comes, and rows are as long as the texts of their batch.
        shape_2 = torch.tensor(tokens_BL.shape, device=tokens_BL.device)
        shapes = [torch.empty_like(shape_2) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(shapes, shape_2, group=self.group)
        for rank, shape in zip(dist.get_process_group_ranks(self.group), torch.stack(shapes).tolist(), strict=True):
            # All as whole numbers, so that one message carries them; states are computed and not sent.
            fields = (tokens_BL, features.supervised_BL.long(), features.segments_BL, features.positions_BL)
            sent_4BL = torch.stack(fields) if rank == own_rank else tokens_BL.new_empty(4, *shape)
            dist.broadcast(sent_4BL, src=rank, group=self.group)
            told = Features(tokens_BL=sent_4BL[0], supervised_BL=sent_4BL[1].bool(), segments_BL=sent_4BL[2],
                            positions_BL=sent_4BL[3])
            # Every process runs every pass: each holds a part of the layers.
            states = encode(features if rank == own_rank else told)
            own = states if rank == own_rank else own
        return own


class FullySharded(_Shared):
    """Every layer's weights divided among the processes of a group, and gathered for the moment in which it runs. Each
    process reads its own rows; all must run equally many passes."""

    name = "fully_sharded"

    @contextmanager
    def reading(self, sketch: Any, device: torch.device, world: int) -> Iterator[dict[str, Any]]:
        from transformers.distributed.configuration_utils import DistributedConfig

        self.require_accelerator(device)
        size = self.size(world)
        yield {"distributed_config": DistributedConfig(fsdp_size=size, dp_replicate_size=world // size,
                                                       fsdp_plan={f"{_layers_name(sketch)}.*": "free_full_weight"})}

    def settled(self, model: Any, device: torch.device) -> Any:
        """The model with everything but its layers gathered for good."""
        from torch.distributed.fsdp import FSDPModule

        model.requires_grad_(False)
        inside = f"{_layers_name(model)}."
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and not name.startswith(inside):
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
        # An output layer that is the embedding was gathered for itself.
        model.tie_weights()
        return super().settled(model, device)


class Zero3(_Shared):
    """Weights divided as fully sharded ones, by DeepSpeed among all processes, in the machine's memory if wanted."""

    name = "zero3"

    def size(self, world: int) -> int:
        if self.degree not in (None, world):
            raise UserError(f"target.placement zero3 divides the target among all {world} processes, but target.degree "
                            f"is {self.degree}; leave it out, or set target.placement: fully_sharded")
        return super().size(world)

    def require_fit(self, sketch: Any, world: int, *, gguf: bool) -> None:
        super().require_fit(sketch, world, gguf=gguf)
        require_deepspeed("target.placement zero3", "target.placement: fully_sharded")
        if sketch.dtype not in DTYPES:
            raise UserError(f"target.dtype {str(sketch.dtype).removeprefix('torch.')} is not divided by DeepSpeed; set "
                            "target.dtype: float32, or target.placement: fully_sharded")

    @contextmanager
    def reading(self, sketch: Any, device: torch.device, world: int) -> Iterator[dict[str, Any]]:
        self.require_accelerator(device)
        self.size(world)
        with read_divided(zero3_settings(sketch.dtype, offload=self.offload)):
            yield {}

    def settled(self, model: Any, device: torch.device) -> Any:
        model.requires_grad_(False)
        gather_by_layer(model, _layers_name(model), zero3_settings(model.dtype, offload=self.offload))
        return model


class Layers(Placement):
    """Whole layers on the devices of one process, neighbours together; everything else on the first device."""

    name = "layers"
    spread = True

    def reading(self, sketch: Any, device: torch.device, world: int) -> AbstractContextManager[dict[str, Any]]:
        count = torch.accelerator.device_count()
        if count < 2 or device.type == "cpu":
            raise UserError("target.placement layers spreads the target over the devices of one process, but there "
                            f"{'is' if count == 1 else 'are'} {count} here; set target.placement: replicated")
        return nullcontext({"device_map": device_map(sketch, [torch.device(device.type, n) for n in range(count)])})


class Disk(Placement):
    """Layers that stay in their files and are read whenever they run, everything else on one device: for a target that
    the machine does not hold, of which it needs embedding, output layer and a few passes to compare with."""

    name = "disk"
    spread = slow = True

    def reading(self, sketch: Any, device: torch.device, world: int) -> AbstractContextManager[dict[str, Any]]:
        inside = f"{_layers_name(sketch)}."
        # It warns of what is asked for here.
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        places = {path: "disk" if path.startswith(inside) else str(home)
                  for path, home in device_map(sketch, [device]).items()}
        # Layers that transformers has in another form than their files, such as joined experts, are written there.
        self.written = TemporaryDirectory(prefix="draftsmith-layers-")
        return nullcontext({"device_map": places, "offload_folder": self.written.name})

    def settled(self, model: Any, device: torch.device) -> Any:
        """The model whose layers know how they are read as a whole, to be hashed and compared."""
        from transformers.integrations.accelerate import load_offloaded_parameter

        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                parameter.stored = partial(load_offloaded_parameter, model, name)
        return model


PLACEMENTS: tuple[type[Placement], ...] = (Placement, TensorParallel, FullySharded, Zero3, Layers, Disk)


def placement_named(name: str, degree: int | None, *, offload: bool = False) -> Placement:
    """The placement of this name; UserError if there is none, it has no degree or one below 1, or it cannot offload."""
    if offload and name != Zero3.name:
        raise UserError(f"target.offload keeps the target's weights in the machine's memory with target.placement zero3"
                        f" only, and the placement is {name}; set target.placement: zero3, or target.offload: false")
    for kind in PLACEMENTS:
        if kind.name == name:
            if degree is not None and not kind.shared:
                raise UserError(f"target.degree {degree} is for processes that share one target, and with target."
                                f"placement {name} none do; leave it out, or set target.placement: fully_sharded")
            return kind(degree, offload=offload)
    raise UserError(f"target.placement must be {', '.join(kind.name for kind in PLACEMENTS)}, got {name!r}")


def device_map(model: Any, devices: list[torch.device]) -> dict[str, torch.device]:
    """The device of each part of a model: its layers in equal blocks of neighbours, the rest on the first device. Where
    they do not divide, later devices hold one more than earlier ones."""
    layers = _layers_name(model)
    count = model.config.get_text_config().num_hidden_layers
    sizes = [(count + number) // len(devices) for number in range(len(devices))]
    homes = [device for device, size in zip(devices, sizes, strict=True) for _ in range(size)]
    found = {f"{layers}.{place}": home for place, home in enumerate(homes)}
    # All else is named at the highest level that holds no layer, so that the map has no gaps.
    path = layers.split(".")
    for depth in range(len(path)):
        parent = model.get_submodule(".".join(path[:depth]))
        here = [*parent._modules, *parent._parameters, *parent._buffers]
        found |= {".".join([*path[:depth], name]): devices[0] for name in here if name != path[depth]}
    return found


def _layers_name(model: Any) -> str:
    """Path of the decoder's list of layers inside a model."""
    layers = layer_list(decoder_of(model), model.config.get_text_config().num_hidden_layers)
    found: str = next(name for name, module in model.named_modules() if module is layers)
    return found


@contextmanager
def _groups(count: int) -> Iterator[None]:
    """A block in which transformers splits a model within each of `count` equal groups of neighbouring processes. Of
    several groups it knows only replicas with fully sharded weights: they copy every layer in each pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import utils

    # What is replaced is no public name: loading calls it by this one.
    mixin: Any = import_module("transformers.distributed.mixin")

    def mesh_of(config: Any) -> tuple[torch.device, Any]:
        kind = torch._C._get_accelerator().type
        utils._ensure_torch_distributed(kind)
        shape = (count, config.pp_size, config.dp_replicate_size, config.fsdp_size, config.tp_size)
        meshes = [init_device_mesh(kind, shape, mesh_dim_names=("group", "pp", "dp_replicate", *names))
                  for names in (("fsdp", "tp"), ("efsdp", "ep"))]
        return utils._bind_local_device(kind, local_rank()), utils.TransformersDeviceMesh(*meshes)

    former = mixin.initialize_distributed_mesh
    mixin.initialize_distributed_mesh = mesh_of
    try:
        yield
    finally:
        mixin.initialize_distributed_mesh = former
