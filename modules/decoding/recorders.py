"""Records of a run of the loop: the seconds of its pieces on their device, the guesses of every pass with the author of
each token, those of each drafter of an ensemble, and the target's states at requests and answers.

Shapes: B rows, C children of a node, K nodes of a path, N places of a pass, R recorded tokens of a pass, T those of all
passes, L tokens of one request and its answer, D hidden size."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..interfaces.proposer import Observation
from ..target.target_rows import PassOutput
from ..token_tree import TokenTree
from ..verification.acceptance_rules import Accepted
from .requests import Generation


class DeviceTimer:
    """Adds up the seconds of pieces of work, and never makes the host wait while they run: on CUDA an event before and
    one after each piece are read later; elsewhere the host's clock is read."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(self._device)
        # Inside a graph that is captured each replay records them anew.
        inside = {"external": True} if torch.cuda.is_current_stream_capturing() else {}
        start, end = (torch.cuda.Event(enable_timing=True, **inside) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        yield
        end.record(stream)
        self._pieces.append((start, end))

    def read(self) -> float:
        """Seconds since the last reading. It waits for the pieces: read where the host has waited for the device."""
        seconds, self._seconds = self._seconds + self.replayed(), 0.0
        self._pieces.clear()
        return seconds

    def replayed(self) -> float:
        """Seconds of the pieces of a graph in its last replay."""
        seconds = 0.0
        for start, end in self._pieces:
            end.synchronize()
            seconds += start.elapsed_time(end) / 1000
        return seconds


class PartCounter:
    """An observer of the decoding loop; it waits for the device once, when it is asked for its counts."""

    def __init__(self) -> None:
        # Of each pass: the requests' indices, and the parts of the accepted guesses, -1 after them, [B, K - 1].
        self.held: list[tuple[list[int], Tensor]] = []

    def __call__(self, tree: TokenTree, accepted: Accepted, generations: Sequence[Generation]) -> None:
        if tree.parts_BN is None:
            return
        columns_K = torch.arange(accepted.path_BK.shape[1], device=accepted.path_BK.device)
        on_path_BK = columns_K < accepted.counts_B[:, None]
        parts_BK = torch.where(on_path_BK, tree.parts_BN.gather(1, accepted.path_BK), -1)
        self.held.append(([generation.request.index for generation in generations], parts_BK[:, 1:]))

    def counts(self, generations: Sequence[Generation], parts: int) -> dict[int, tuple[int, ...]]:
        """Guesses of each part of the ensemble in each finished answer, by the request's index; what lies after an end
        of an answer is left out."""
        passes: dict[int, list[list[int]]] = {}
        for indices, parts_BK in self.held:
            for index, line in zip(indices, parts_BK.tolist(), strict=True):
                passes.setdefault(index, []).append(line)
        found = {}
        for one in generations:
            # A pass that failed added nothing and has no count.
            lines = zip(passes.get(one.request.index, []), one.emitted, strict=False)
            written = [part for line, count in lines for part in line[:count]]
            found[one.request.index] = tuple(written.count(part) for part in range(parts))
        return found


@dataclass(frozen=True, kw_only=True)
class WrittenToken:
    """One token of an answer and its author."""

    token: int  # Its id
    guessed: bool  # True for an accepted guess of the draft, False for a token that the target chose itself
    rejected: tuple[int, ...] = ()  # The draft's guesses for the same place that the target rejected


@dataclass(frozen=True, kw_only=True)
class GuessedPass:
    """The guesses of one row's pass, as verified. That over the prompt has none, and its token is the target's."""

    accepted: int = 0  # Accepted guesses; the token after them is the target's own
    rejected: tuple[int, ...] = ()  # Guesses for the place of the target's token, in the tree's order, each once

    def written(self, tokens: Sequence[int]) -> list[WrittenToken]:
        """The tokens that the pass added to its answer, with their authors, up to the answer's end."""
        return [WrittenToken(token=token, guessed=place < self.accepted,
                             rejected=self.rejected if place == self.accepted else ())
                for place, token in enumerate(tokens)]


@dataclass
class PassRecorder:
    """An observer of the decoding loop that keeps the guesses of every pass; it waits for the device when it is asked
    for them."""

    held: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Of passes that were not asked for yet: the requests' indices; and the accepted guesses, and those for the place
    after them, -1 for none, [B, 1 + C]."""
    read: dict[int, list[GuessedPass]] = field(default_factory=dict)  # The others, by the request's index

    def __call__(self, tree: TokenTree, accepted: Accepted, generations: Sequence[Generation]) -> None:
        last_B1 = accepted.counts_B[:, None] - 1
        children_BC, real_BC = tree.children(accepted.path_BK.gather(1, last_B1)[:, 0])
        guesses_BC = torch.where(real_BC, tree.tokens_BN.gather(1, children_BC), -1)
        indices = [generation.request.index for generation in generations]
        self.held.append((indices, torch.cat([last_B1, guesses_BC], dim=1)))

    @property
    def passes(self) -> dict[int, list[GuessedPass]]:
        """Passes after the prompt's, by the request's index."""
        for indices, rows in self.held:
            for index, (count, *guesses) in zip(indices, rows.tolist(), strict=True):
                rejected = tuple(dict.fromkeys(token for token in guesses if token >= 0))
                self.read.setdefault(index, []).append(GuessedPass(accepted=count, rejected=rejected))
        self.held.clear()
        return self.read

    def written(self, generation: Generation) -> list[WrittenToken]:
        """All tokens of a finished answer, with their authors."""
        found = GuessedPass().written(generation.tokens[:1])
        # A pass that failed added nothing and has no count.
        for one, count in zip(self.passes.get(generation.request.index, []), generation.emitted, strict=False):
            found += one.written(generation.tokens[len(found) : len(found) + count])
        return found


@dataclass(frozen=True, kw_only=True)
class RecordedStates:
    """The target's states at the tokens of one request and its answer, on the CPU."""

    tokens: tuple[int, ...]  # The tokens as the target read them
    final_LD: Tensor  # Its final states, after the last norm
    taps: dict[int, Tensor]  # Outputs of the recorded layers, each [L, D]


class StateRecorder:
    """The target's states at the tokens of each request and its answer, for one run of the loop: the final ones and the
    outputs of the layers `taps`, kept as `dtype`. A pass is added whole, in one piece for each kind of state; `states`
    sorts the pieces by request. Memory on the CPU: tokens x hidden size x (1 + number of taps) x bytes of a number."""

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
    # A replayed pass has rows of no sequence after the others.
    values, width = values[: len(counts)], values.shape[1]
    # Pieces of prompts are mostly full: these values need no copy.
    if all(count == width for count in counts):
        return values.flatten(0, 1)
    places = [row * width + place for row, count in enumerate(counts) for place in range(count)]
    return values.flatten(0, 1)[torch.tensor(places, device=values.device)]
