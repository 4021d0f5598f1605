"""Record of the target's states at the tokens of requests and their answers, as the passes of the loop compute them.

Shapes: B rows, N places of a pass, R recorded tokens of a pass, T those of all passes, L tokens of one request and its
answer, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..interfaces.proposer import Observation
from ..target.pass_output import PassOutput
from .requests import Generation


@dataclass(frozen=True, kw_only=True)
class RecordedStates:
    """The target's states at the tokens of one request and its answer, on the CPU."""

    tokens: tuple[int, ...]  # The tokens as the target read them
    final_LD: Tensor  # Its final states, after the last norm
    taps: dict[int, Tensor]  # Outputs of the recorded layers, each [L, D]


class StateRecorder:
    """The target's states at the tokens of each request and its answer, for one run of the loop: the final ones and the
    outputs of the layers `taps`, kept as `dtype`.

    A pass is added whole, in one piece for each kind of state; `states` sorts the pieces by request. Memory on the CPU:
    tokens x hidden size x (1 + number of taps) x bytes of a number."""

    def __init__(self, taps: Sequence[int], dtype: torch.dtype) -> None:
        self.taps, self.dtype = tuple(sorted(set(taps))), dtype
        self._tokens: list[Tensor] = []
        self._final: list[Tensor] = []
        self._tapped: dict[int, list[Tensor]] = {layer: [] for layer in self.taps}
        self._size = 0
        self._places: dict[int, list[int]] = {}

    def add_prefix(self, tokens: Sequence[int], output: PassOutput) -> None:
        """Add what all requests start with, before anything else: the output of the one pass that read it."""
        count = output.final_BND.shape[1]
        self._add(torch.tensor(tokens[:count]), output.final_BND[0],
                  {layer: states_1ND[0] for layer, states_1ND in output.taps.items()})

    def open(self, index: int, shared: int) -> None:
        """Start the request `index`, whose first `shared` tokens are those of the prefix."""
        self._places[index] = list(range(shared))

    def add(self, indices: Sequence[int], counts: Sequence[int], observation: Observation) -> None:
        """Add a pass: the first counts[b] tokens of row b belong to the request indices[b]."""
        first = self._size
        for index, count in zip(indices, counts, strict=True):
            # A request that went wrong was dropped, while its row may still be in the pass.
            if index in self._places:
                self._places[index].extend(range(first, first + count))
            first += count
        self._add(_real(observation.tokens_BN, counts), _real(observation.final_BND, counts),
                  {layer: _real(observation.taps[layer], counts) for layer in self.taps})

    def drop(self, index: int) -> None:
        """Forget a request that went wrong: it has no states."""
        self._places.pop(index, None)

    def settled(self, generation: Generation) -> bool:
        """True when the states of all its tokens are there, or will never be."""
        places = self._places.get(generation.request.index)
        return places is None or len(places) >= len(generation.request.tokens) + len(generation.tokens)

    def states(self, generations: Sequence[Generation]) -> dict[int, RecordedStates]:
        """The states of finished requests by index, those without any left out; the recorder is then empty."""
        found = {one.request.index: places[: len(one.request.tokens) + len(one.tokens)] for one in generations
                 if (places := self._places.get(one.request.index)) is not None and self.settled(one)}
        self._places.clear()

        def ordered(pieces: list[Tensor]) -> dict[int, Tensor]:
            """The values of each request in the order of its places; the pieces are freed, kind after kind, so that no
            more than one kind is held twice."""
            values_T = torch.cat(pieces) if found else torch.zeros(0)
            pieces.clear()
            return {index: values_T[torch.tensor(places)] for index, places in found.items()}

        tokens, final = ordered(self._tokens), ordered(self._final)
        taps = {layer: ordered(pieces) for layer, pieces in self._tapped.items()}
        return {index: RecordedStates(tokens=tuple(tokens[index].tolist()), final_LD=final[index],
                                      taps={layer: states[index] for layer, states in taps.items()})
                for index in found}

    def _add(self, tokens_R: Tensor, final_RD: Tensor, taps: dict[int, Tensor]) -> None:
        # Pass by pass to the CPU: the device has no room for the states of whole answers.
        self._tokens.append(tokens_R.cpu())
        self._final.append(final_RD.to("cpu", self.dtype))
        for layer in self.taps:
            self._tapped[layer].append(taps[layer].to("cpu", self.dtype))
        self._size += len(tokens_R)


def _real(values: Tensor, counts: Sequence[int]) -> Tensor:
    """The first counts[b] of the values [B, N, ...] of each row, row after row: [R, ...]."""
    width = values.shape[1]
    # Pieces of prompts are mostly full: these values need no copy.
    if all(count == width for count in counts):
        return values.flatten(0, 1)
    places = [row * width + place for row, count in enumerate(counts) for place in range(count)]
    return values.flatten(0, 1)[torch.tensor(places, device=values.device)]
