"""States of an optimizer under DeepSpeed's ZeRO as those of one process, and back.

ZeRO joins the weights of a group to one vector, of which each process keeps a part in float32, with the optimizer's
states of that part: it is what the optimizer steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class LaidOut:
    """A weight of an optimizer before it was divided."""

    weight: Any  # With the attributes that DeepSpeed gives it
    number: int  # Its number in the state of one process
    group: int  # Number of its group
    shape: torch.Size


def optimizer_layout(optimizer: Optimizer) -> tuple[LaidOut, ...]:
    """The weights of an optimizer, whole yet."""
    numbered = optimizer.state_dict()["param_groups"]
    return tuple(LaidOut(weight, number, place, weight.shape)
                 for place, group in enumerate(optimizer.param_groups)
                 for weight, number in zip(group["params"], numbered[place]["params"], strict=True))


@dataclass(frozen=True)
class Part:
    """The elements of a weight that this process keeps, perhaps none."""

    vector: Tensor  # The vector that holds them, a key of the optimizer's states
    there: slice  # Their places in it
    own: slice  # Their places in the flattened weight


def part_of(zero: Any, one: LaidOut) -> Part:
    """The part of a weight in this process, by DeepSpeed's optimizer of stage 1, 2 or 3."""
    if hasattr(one.weight, "ds_id"):
        place, start, length = zero.grad_position[zero.get_param_id(one.weight)]
        first = dist.get_rank() * length
        # All parts are equally long: the last ones are filled up.
        length = min(length, max(0, one.shape.numel() - first))
        return Part(zero.fp32_partitioned_groups_flat[place], slice(start, start + length),
                    slice(first, first + length))
    vector, mapping = zero.single_partition_of_fp32_groups[one.group], one.weight._hp_mapping
    if mapping is None:
        return Part(vector, slice(0), slice(0))
    held, first = mapping.get_hp_fragment_address(), mapping.lp_fragment_address.start
    return Part(vector, slice(held.start, held.start + held.numel), slice(first, first + held.numel))


def whole_optimizer_state(zero: Any, layout: tuple[LaidOut, ...]) -> dict[str, Any]:
    """The state that one process has, on the CPU; all processes must call it."""
    inner: Optimizer = zero.optimizer
    states: dict[int, dict[str, Tensor]] = {}
    for one in layout:
        part = part_of(zero, one)
        states[one.number] = {}
        for name, value in inner.state[part.vector].items():
            if not value.ndim:
                states[one.number][name] = value.cpu().clone()  # Shared, it would be counted by each weight.
                continue
            # Each element comes from the process that keeps it; the others add zeros.
            whole = value.new_zeros(one.shape.numel())
            whole[part.own] = value[part.there]
            dist.all_reduce(whole)
            states[one.number][name] = whole.reshape(one.shape).cpu()
    groups = [{name: value for name, value in group.items() if name != "params"}
              | {"params": [one.number for one in layout if one.group == place]}
              for place, group in enumerate(inner.param_groups)]
    return {"state": states, "param_groups": groups}


def load_optimizer_state(zero: Any, layout: tuple[LaidOut, ...], state: dict[str, Any]) -> None:
    """Take this process's parts of a state that `whole_optimizer_state` or one process gave."""
    inner: Optimizer = zero.optimizer
    for one in layout:
        part = part_of(zero, one)
        for name, value in state["state"][one.number].items():
            if not value.ndim:
                inner.state[part.vector][name] = value.clone()
                continue
            held = inner.state[part.vector].setdefault(name, torch.zeros_like(part.vector, requires_grad=False))
            held[part.there] = value.reshape(-1)[part.own]
    for group, stored in zip(inner.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in stored.items() if name != "params"})
