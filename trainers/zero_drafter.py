"""DeepSpeed's ZeRO for a drafter in training: its states, gradients and weights divided among the processes. What
decodes in validation is a whole copy that holds the same weights.

DeepSpeed's engine clips and accumulates by itself; it knows the micro-batches of a step, not their labels. Here the
number of labels is its loss scale, by which it divides the gradient just before it clips. ZeRO joins the weights of a
group to one vector, of which each process keeps a part in float32, with the optimizer's states of that part: it is what
the optimizer steps. A checkpoint is that of one process, so that any other strategy and number of processes resumes it.
"""

import copy
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from ..modules import UserError
from ..modules.processes import prepare_deepspeed, require_deepspeed
from ..modules.target.loading.model_parts import whole
from .train_config import ZERO_STAGES, TrainConfig


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a module, each whole; the processes that split them must call it together."""
    return {name: whole(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}


@dataclass(frozen=True)
class LaidOut:
    """A weight of an optimizer before it was divided."""

    weight: Any  # With the attributes that DeepSpeed gives it
    number: int  # Its number in the state of one process
    group: int  # Number of its group
    shape: torch.Size


def part_of(zero: Any, one: LaidOut) -> tuple[Tensor, slice, slice]:
    """(vector, places in it, places in the flattened weight) of the elements of a weight that this process keeps,
    perhaps none, by DeepSpeed's optimizer of stage 1, 2 or 3; the vector is a key of the optimizer's states."""
    if hasattr(one.weight, "ds_id"):
        place, start, length = zero.grad_position[zero.get_param_id(one.weight)]
        first = dist.get_rank() * length
        # All parts are equally long: the last ones are filled up.
        length = min(length, max(0, one.shape.numel() - first))
        return zero.fp32_partitioned_groups_flat[place], slice(start, start + length), slice(first, first + length)
    vector, mapping = zero.single_partition_of_fp32_groups[one.group], one.weight._hp_mapping
    if mapping is None:
        return vector, slice(0), slice(0)
    held, first = mapping.get_hp_fragment_address(), mapping.lp_fragment_address.start
    return vector, slice(held.start, held.start + held.numel), slice(first, first + held.numel)


BUCKET = 50_000_000  # Most elements of gradients that are sent at once


class ZeroDrafter(DeepSpeedStrategy):
    """ZeRO over all processes, on CUDA devices or on the CPU, which Lightning's own refuses. Stage 1 divides the
    optimizer's states, 2 the gradients too, 3 the weights too; `clip` is the largest norm of the whole gradient, 0 for
    any. `on_cpu` if they train there, wherever they could. UserError if DeepSpeed is not installed."""

    lightning_module: Any

    def __init__(self, stage: int, *, clip: float, on_cpu: bool) -> None:
        require_deepspeed(f"train.strategy deepspeed_stage_{stage}", "train.strategy: ddp", on_cpu=on_cpu)
        super().__init__(logging_level=40, config={
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": float(clip),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "overlap_comm": False, "contiguous_gradients": True,
                                  "memory_efficient_linear": False},
        })
        self.stage = stage

    # Processes and precision -----------------------------------------------------------------------------------------

    # DeepSpeed's own refuses a CPU.
    setup_environment = DDPStrategy.setup_environment

    def setup_distributed(self) -> None:
        """Join the processes, by DeepSpeed."""
        prepare_deepspeed()
        if self.root_device.type == "cpu":
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()

    @property
    def precision_plugin(self) -> Precision:
        """Precision of the arithmetic alone: see `EnginePrecision`."""
        return self._engine_precision

    @precision_plugin.setter
    def precision_plugin(self, given: Precision | None) -> None:
        mixed = given is not None and given.precision == "bf16-mixed"
        self._engine_precision = EnginePrecision("bf16-mixed" if mixed else "32-true")

    def _format_config(self) -> None:
        """Gradients are sent in buckets no larger than the drafter: those of DeepSpeed's own size take 2 GB, whatever
        they hold. DeepSpeed's own settings of number formats are left out."""
        if self.config is None:
            raise RuntimeError("DeepSpeed was given no settings")
        trained = sum(weight.numel() for weight in self.lightning_module.parameters() if weight.requires_grad)
        self.config["zero_optimization"]["reduce_bucket_size"] = min(BUCKET, trained)

    # Setup -----------------------------------------------------------------------------------------------------------

    # The drafter is built whole, as under any strategy, and divided afterwards.
    model_sharded_context = DDPStrategy.model_sharded_context

    def setup(self, trainer: Any) -> None:
        """Divide the drafter, of which a whole copy is kept for decoding."""
        self.lightning_module.whole = (copy.deepcopy(self.lightning_module.drafter).to("cpu"),)
        self.lightning_module.to(self.root_device)
        super().setup(trainer)

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        import deepspeed

        # The weights of the optimizer, whole yet.
        numbered = optimizer.state_dict()["param_groups"]
        self._layout = tuple(LaidOut(weight, number, place, weight.shape)
                             for place, group in enumerate(optimizer.param_groups)
                             for weight, number in zip(group["params"], numbered[place]["params"], strict=True))
        one = OneModule(model, mixed=self.precision_plugin.precision == "bf16-mixed")
        engine, zero, _, _ = deepspeed.initialize(
            args=Namespace(device_rank=self.local_rank), config=self.config, model=one, optimizer=optimizer,
            model_parameters=[weight for weight in one.parameters() if weight.requires_grad],
            lr_scheduler=lr_scheduler, dist_init_required=False)
        return engine, zero

    # A step ----------------------------------------------------------------------------------------------------------

    # The engine is asked for a step when its micro-batches are complete.
    handles_gradient_accumulation = False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A block with a micro-batch that is not the last one of its step."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        yield
        self.deepspeed_engine.set_gradient_accumulation_boundary(True)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """The engine's step, without scaling the next loss. UserError if the gradient is not finite: the engine would
        leave out the step and go on."""
        found = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.deepspeed_engine.optimizer.override_loss_scale(1.0)
        if self.deepspeed_engine.optimizer.overflow:
            step, lr = self.lightning_module.global_step + 1, self.lightning_module.config.lr
            raise UserError(f"the gradient is not finite at optimizer step {step}; lower lr (now {lr}) and train again "
                            "into an empty --out folder")
        return found

    # Checkpoints -----------------------------------------------------------------------------------------------------

    # They hold whole weights and states of the optimizer under the names that one process gives them, in one file that
    # every process reads, so that any other strategy and number of processes resumes them.
    lightning_restore_optimizer = True
    load_checkpoint = Strategy.load_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights; all processes must call it."""
        return {name: tensor.cpu() for name, tensor in whole_state(self.lightning_module).items()}

    # Weights are read before they are divided.
    restore_checkpoint_after_setup = False
    load_model_state_dict = DDPStrategy.load_model_state_dict
    # They are whole by then: the first process alone writes.
    save_checkpoint = DDPStrategy.save_checkpoint

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the optimizer that one process has, on the CPU; all processes must call it."""
        zero = self.deepspeed_engine.optimizer
        states: dict[int, dict[str, Tensor]] = {}
        for one in self._layout:
            vector, there, own = part_of(zero, one)
            states[one.number] = {}
            for name, value in zero.optimizer.state[vector].items():
                if not value.ndim:
                    states[one.number][name] = value.cpu().clone()  # Shared, it would be counted by each weight.
                    continue
                # Each element comes from the process that keeps it; the others add zeros.
                whole = value.new_zeros(one.shape.numel())
                whole[own] = value[there]
                dist.all_reduce(whole)
                states[one.number][name] = whole.reshape(one.shape).cpu()
        groups = [{**group, "params": [one.number for one in self._layout if one.group == place]}
                  for place, group in enumerate(zero.optimizer.param_groups)]
        return {"state": states, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep this process's part of each state."""
        zero, state = self.deepspeed_engine.optimizer, checkpoint["optimizer_states"][0]
        for one in self._layout:
            vector, there, own = part_of(zero, one)
            kept = zero.optimizer.state[vector]
            for name, value in state["state"][one.number].items():
                if not value.ndim:
                    kept[name] = value.clone()
                    continue
                held = kept.setdefault(name, torch.zeros_like(vector, requires_grad=False))
                held[there] = value.reshape(-1)[own]
        for group, stored in zip(zero.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in stored.items() if name != "params"})


class EnginePrecision(DeepSpeedPrecision):
    """DeepSpeed's steps without a word about number formats: weights stay in float32, states of the target in its own
    format, and `OneModule` computes in bfloat16."""

    convert_module = Precision.convert_module
    convert_input = Precision.convert_input


class OneModule(nn.Module):
    """All weights of a training module as those of one module without parts, which computes in bfloat16 if `mixed`.

    ZeRO-3 gathers a module's own weights when it is called and records which modules are called, in all processes the
    same. Drafters read weights of parts that are not called, and how often some are depends on a process's batch."""

    def __init__(self, module: nn.Module, *, mixed: bool) -> None:
        super().__init__()
        self.called, self.mixed = (module,), mixed
        for place, weight in enumerate(module.parameters()):
            self.register_parameter(f"weight_{place}", weight)

    def forward(self, *given: Any) -> Any:
        """The module's answer."""
        device = next(self.parameters()).device.type
        # With a cache, gradients of a weight that is used several times would be added up in bfloat16.
        with torch.autocast(device, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
            return self.called[0](*given)


def strategy_for(config: TrainConfig) -> str | Strategy:
    """Lightning's strategy, or its name. Raises UserError for one under which a training would learn something else."""
    if config.strategy not in ZERO_STAGES:
        return config.strategy
    if config.optimizer == "muon":
        raise UserError(f"train.optimizer muon orthogonalises whole matrices, and train.strategy {config.strategy} "
                        "steps pieces of the joined weights; set train.optimizer: adamw, or train.strategy: ddp")
    return ZeroDrafter(ZERO_STAGES[config.strategy], clip=config.clip, on_cpu=config.accelerator == "cpu")
