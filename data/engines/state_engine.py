"""Engines that give the target's states at given tokens, in place of its own passes: token ids in, tapped and last
states out.

Shapes: T tokens of a request, D hidden size of the target.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...modules import Target, UserError
from ..answers.answer_server import at_once
from ..store.feature_shards import FINAL
from ..store.token_store import TokenShard

AGAIN = "start the engine and the same command again: finished shards are kept"  # Remedy where an engine is not there


class StateEngine:
    """An engine at an address or in a folder that reads whole rows; called as `read_rows` is without its target."""

    width: ClassVar[int]  # Requests at once
    request_tokens: ClassVar[int]  # Most tokens of a request of several rows

    def __init__(self, place: str, target: Target) -> None:
        self.place, self.target = place, target
        self.dtype = target.dtype  # Number format in which the engine gave the latest states

    @abstractmethod
    def _asked(self, rows: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """The named states of some rows of token ids, one after another, [T, D] each."""

    def __call__(self, shard: TokenShard, rows: Sequence[int], names: Sequence[str], dtype: torch.dtype,
                 advance: Callable[[int], object] | None = None) -> dict[int, dict[str, Tensor]]:
        """The named states of these rows of a shard, as `read_rows` gives them. UserError if the engine cannot be
        reached, or gives something else."""
        texts = {row: shard.tokens_T[slice(*shard.span(row))] for row in rows}
        groups: list[tuple[int, ...]] = []
        for row in rows:
            joined = (*groups[-1], row) if groups else (row,)
            if len(joined) > 1 and sum(len(texts[one]) for one in joined) <= self.request_tokens:
                groups[-1] = joined
            else:
                groups.append((row,))
        found: dict[int, dict[str, Tensor]] = {}
        for group, states in at_once(lambda group: self._asked([texts[row] for row in group], names), groups,
                                     self.width):
            lengths = [len(texts[row]) for row in group]
            self._check(states, names, sum(lengths))
            self.dtype = states[FINAL].dtype
            parts = {name: torch.split(states[name].to(dtype), lengths) for name in names}
            found |= {row: {name: part[place].clone() for name, part in parts.items()}
                      for place, row in enumerate(group)}
            if advance is not None:
                advance(sum(lengths))
        return found

    def _check(self, states: dict[str, Tensor], names: Sequence[str], tokens: int) -> None:
        """Refuse states that are none of these tokens. Raises UserError."""
        shape = (tokens, self.target.hidden_size)
        for name in names:
            if name not in states:
                raise UserError(f"{self.place} gives no {name} (it gives {', '.join(sorted(states)) or 'nothing'}); "
                                f"an engine gives {', '.join(names)} here")
            one = states[name]
            if one.shape != shape or not one.is_floating_point():
                raise UserError(f"{self.place} gives {name} as {str(one.dtype).removeprefix('torch.')} of shape "
                                f"{tuple(one.shape)}, not as floating-point numbers of shape {shape}; serve "
                                f"{self.target.identity.name}")
            if not bool(one.isfinite().all()):
                raise UserError(f"{self.place} gives values in {name} that are not finite; serve the model in bfloat16 "
                                "or float32")
