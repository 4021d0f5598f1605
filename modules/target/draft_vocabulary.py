"""A reduced draft vocabulary: the tokens that a drafter may propose, and the target's output layer restricted to them.

Shapes: V entries of the target's vocabulary, Q of the draft vocabulary, D hidden size."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UserError
from .linear_forms import by_tokens, can_pack, packed_linear
from .model import Target


def choose(counts_V: Tensor, size: int, *, always: Sequence[int] = ()) -> Tensor:
    """The `size` token ids that are labels most frequently, by counts or expected ones, in ascending order, [Q] int64;
    equal counts go to the lower id. The ids `always`, such as the end of a turn, belong to it whatever their count.
    UserError if `size` does not lie between the number of these (at least 1) and V."""
    least = max(1, len(set(always)))
    if not least <= size <= len(counts_V):
        raise UserError(
            f"the draft vocabulary must have between {least} and {len(counts_V)} entries (the target's vocabulary), "
            f"got {size}; set vocabulary_size within these bounds, or to null for "
            "the whole vocabulary")
    ranking_V = counts_V.detach().cpu().to(torch.float64).clone()
    # Counts may be sums of chances, so no whole number would be surely above all of them.
    ranking_V[list(always)] = float("inf")
    order_V = torch.argsort(ranking_V, descending=True, stable=True)
    return order_V[:size].sort().values


def require_ids(wanted: int | None, ids_Q: Tensor | None) -> None:
    """Refuse ids of a draft vocabulary of another size than the wanted one, and ids that occur twice; None stands for
    the whole vocabulary. Raises UserError."""
    given = None if ids_Q is None else len(ids_Q)
    if given != wanted:
        raise UserError(f"vocabulary_size is {wanted} but {given} token ids were given; choose as many with "
                        "draftsmith.modules.target.draft_vocabulary.choose")
    require_distinct(ids_Q)


def require_distinct(ids_Q: Tensor | None) -> None:
    """Refuse a draft vocabulary in which an id occurs twice (UserError): one of the two would have a probability that
    the rules of acceptance do not see, and sampled answers would not have the target's distribution."""
    if ids_Q is None:
        return
    sorted_Q = ids_Q.sort().values
    repeated = sorted_Q[1:][sorted_Q[1:] == sorted_Q[:-1]]
    if len(repeated):
        count = int((ids_Q == repeated[0]).sum())
        raise UserError(f"token {int(repeated[0])} occurs {count} times in the draft vocabulary; give every id once, "
                        "as draftsmith.modules.target.draft_vocabulary.choose does")


def over_all_tokens(rows: Tensor, ids_Q: Tensor | None, vocab_size: int) -> Tensor:
    """A trained output layer [Q, D], or its bias [Q], with rows for the whole vocabulary. Those of tokens outside the
    draft vocabulary are the mean of the trained ones: their logit is a mean too, and never the best one."""
    if ids_Q is None:
        return rows
    whole = rows.detach().mean(0).expand(vocab_size, *rows.shape[1:]).clone()
    whole[ids_Q] = rows.detach()
    return whole


def draft_index(ids_Q: Tensor, vocab_size: int) -> Tensor:
    """The entry of the draft vocabulary that stands for each target token, [V] int64; -1 where none does."""
    index_V = torch.full((vocab_size,), -1, dtype=torch.long, device=ids_Q.device)
    index_V[ids_Q] = torch.arange(len(ids_Q), device=ids_Q.device)
    return index_V


def carry_rows(layer: nn.Module, ids_Q: Tensor | None, former: nn.Module, former_ids_P: Tensor | None,
               vocab_size: int) -> Tensor:
    """Copy an output layer's rows of the tokens, of its `ids_Q`, that a former one of the same width has too (None is
    all tokens); the other rows stay. Returns True at the copied rows, [Q]."""
    every_V = torch.arange(vocab_size, device=next(layer.parameters()).device)
    wanted_Q, known_P = (every_V if ids is None else ids.to(every_V) for ids in (ids_Q, former_ids_P))
    entries_Q = draft_index(known_P, vocab_size)[wanted_Q]
    there_Q = entries_Q >= 0
    for name, parameter in layer.named_parameters():
        rows = former.get_parameter(name).detach().to(parameter)
        parameter.data[there_Q] = rows[entries_Q[there_Q]]
    return there_Q


class OwnOutput(nn.Linear):
    """A drafter's own output layer, NaN until it is loaded or copied, so that forgetting it shows at once. It has one
    row an entry of the draft vocabulary. Without a bias of its own, the target's is added."""

    def reset_parameters(self) -> None:
        """NaN everywhere; nothing is drawn."""
        for parameter in self.parameters():
            nn.init.constant_(parameter, float("nan"))


class OutputRows:
    """The target's output layer, restricted to a draft vocabulary `ids_Q` or whole, borrowed by a drafter or a loss.
    The rows are selected once, here. It is no `nn.Module` and holds no parameter, so whoever keeps it neither saves,
    trains nor moves it, and a copy of its owner shares it."""

    def __init__(self, target: Target, ids_Q: Tensor | None = None) -> None:
        self.target, self.ids_Q = target, ids_Q
        weight_VD, bias_V = target.output_weight(), target.head.bias
        self.bias_Q = bias_V.detach() if isinstance(bias_V, Tensor) else None
        self.weight_QD = weight_VD if ids_Q is None else weight_VD[ids_Q.to(weight_VD.device)]
        if ids_Q is not None and self.bias_Q is not None:
            self.bias_Q = self.bias_Q[ids_Q.to(weight_VD.device)]
        self._packed_from, self._cast_to = 0, self.weight_QD.dtype
        # No method of this object: holding itself, it would keep the selected rows until the garbage collector came by.
        self._plain: Callable[[Tensor], Tensor] = partial(functional.linear, weight=self.weight_QD, bias=self.bias_Q)
        self._form: Callable[[Tensor], Tensor] = self._plain
        self._cast: Callable[[Tensor], Tensor] = self._plain

    def __deepcopy__(self, _memo: dict[int, Any]) -> "OutputRows":
        return self

    def __call__(self, final: Tensor) -> Tensor:
        """Logits [..., Q] of final states [..., D], as the target computes them; the gradient reaches the states."""
        states = final.to(self.weight_QD.dtype)
        # Packed forms have no gradient.
        if torch.is_grad_enabled():
            return self.unpacked(states)
        if self.ids_Q is None:
            return self.target.logits(states)
        return self.target.post_process(self._form(states))

    def unpacked(self, final: Tensor) -> Tensor:
        """The same, in the number format of autocast where that is on, which would cast frozen weights in every call:
        the rows are cast once."""
        device, dtype, states = self.weight_QD.device.type, self.weight_QD.dtype, final.to(self.weight_QD.dtype)
        if dtype == torch.float32 and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if dtype != self._cast_to:
            with torch.inference_mode(False), torch.no_grad():
                bias_Q = None if self.bias_Q is None else self.bias_Q.to(dtype)
                self._cast_to = dtype
                self._cast = partial(functional.linear, weight=self.weight_QD.to(dtype), bias=bias_Q)
        return self.target.post_process(self._cast(states))

    def through(self, states: Tensor, layer: nn.Linear) -> Tensor:
        """The same by another output layer: scaling and soft-capping stay, the bias where the layer has none."""
        logits: Tensor = layer(states.to(layer.weight.dtype))
        if layer.bias is None and self.bias_Q is not None:
            logits = logits + self.bias_Q.to(logits.dtype)
        return self.target.post_process(logits)

    def pack(self) -> None:
        """Give the selected rows the form of the target's layers, for decoding; a whole layer has that already."""
        packed_from = self.target.linears.packing.packed_from
        if self.ids_Q is None or packed_from == self._packed_from or not can_pack(self.target.head):
            return
        self._packed_from, self._form = packed_from, self._plain
        if packed_from:
            self._form = partial(by_tokens, packed=packed_linear(self.weight_QD, self.bias_Q), plain=self._plain,
                                 packed_from=packed_from)
