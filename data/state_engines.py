"""Engines that give the target's states at given tokens, in place of its own passes: token ids in, tapped and last
states out; with a trial before any are stored, of those of a few rows next to the target's own.

One takes its requests from a folder, the contract in the guide to large targets. A request is NAME.asked, a
safetensors file with `tokens` (int32 [T]: all rows, one after another), `starts` (int64: the first token of each row,
and T) and `taps` (int64: layers). An engine renames it to NAME.taken and leaves NAME.states with `final` and `tap_I` of
each layer I, [T, D] each.

The other is vLLM's OpenAI-style server with the method `extract_hidden_states`: a prompt is read, and the states of
chosen layers are left in a file whose path comes with the answer. The last layer's are those before the last norm.

Shapes: T tokens of a request, K layers, D hidden size of the target."""

import fcntl
import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..modules import Target, UserError
from ..modules.files.atomic_files import make_folder
from ..modules.files.json_records import shortened
from .answers.answer_server import ANSWER_SECONDS, AnswerServer, at_once
from .store.feature_shards import FINAL, StoredFile, tap
from .store.feature_store import Encoding, read_rows
from .store.token_store import Row, TokenShard, write_bytes, write_tensors

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


TAKEN_SECONDS = 60.0  # Longest time without a request that is taken
POLL_SECONDS = 0.05  # Time between two looks


class FolderEngine(StateEngine):
    """An engine, or several, at work in a folder, on a disk or in shared memory. Raises UserError if the folder cannot
    be made."""

    # One is computed while the other is read: states of a large target fill gigabytes.
    width = 2
    request_tokens = 4096

    def __init__(self, place: str, target: Target) -> None:
        super().__init__(place, target)
        self.folder = Path(place)
        make_folder(self.folder)
        self._lived = time.monotonic()

    def _asked(self, rows: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        taps = [int(name.removeprefix("tap_")) for name in names if name != FINAL]
        # Named by its content, so that a command that goes on finds what an engine has left for a killed one.
        content = repr([self.target.identity.weights_hash, taps, [row.tolist() for row in rows]])
        name = hashlib.sha256(content.encode()).hexdigest()[:32]
        asked, taken, given = (self.folder / f"{name}.{end}" for end in ("asked", "taken", "states"))
        if not given.exists():
            # A file of a request that an engine took and died with would count as one at work.
            taken.unlink(missing_ok=True)
            write_bytes(asked, save({"tokens": torch.cat(list(rows)).int(), "taps": torch.tensor(taps).long(),
                                     "starts": torch.tensor([0, *accumulate(map(len, rows))])}))
        started, was_taken = time.monotonic(), False
        while not given.exists():
            if not was_taken and not asked.exists():
                was_taken, self._lived = True, time.monotonic()
            # While it is at work on one request, others wait.
            busy = next(self.folder.glob("*.taken"), None) is not None
            limit = ANSWER_SECONDS if busy else TAKEN_SECONDS
            if time.monotonic() - max(started, self._lived) > limit:
                for file in (asked, taken):
                    file.unlink(missing_ok=True)
                raise UserError(f"no engine {'answers' if busy else 'takes'} requests in {self.folder} (for {limit:g} "
                                f"seconds none did); {AGAIN}")
            time.sleep(POLL_SECONDS)
        self._lived = time.monotonic()
        try:
            states: dict[str, Tensor] = load_file(given)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{given} cannot be read as a safetensors file ({error}); an engine writes it under "
                            "another name and then renames it: mend that and start again") from error
        finally:
            given.unlink(missing_ok=True)
        return states


class VllmEngine(StateEngine):
    """A server by its address, http://host:port/v1, and the folder in which it leaves files, under one name on both
    machines. Raises UserError if it is no address."""

    # A prompt is a request, and the server batches them.
    width = 8
    request_tokens = 0

    def __init__(self, place: str, target: Target) -> None:
        super().__init__(place, target)
        self.server = AnswerServer(place)

    def _asked(self, rows: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        [tokens_T], last = rows, self.target.num_layers
        # It numbers what enters a layer: the output of layer i is that which enters layer i + 1.
        layers = {name: last if name == FINAL else int(name.removeprefix("tap_")) + 1 for name in names}
        ids = sorted(set(layers.values()))
        start = ("start vLLM with the method extract_hidden_states and eagle_aux_hidden_state_layer_ids "
                 f"{ids} as recipes/guides/large-targets-and-clusters.md shows")
        answer = self.server.response(f"{self.server.address}/completions", {
            "model": self.server.model, "prompt": tokens_T.tolist(), "max_tokens": 1, "temperature": 0.0})
        file = ((answer if isinstance(answer, dict) else {}).get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise UserError(f"{self.place} names no file of states ({shortened(answer)}); {start}")
        found = self._read(Path(file))
        states_TKD, said_T = found.get("hidden_states"), found.get("token_ids")
        if states_TKD is None or said_T is None or said_T.tolist() != tokens_T.tolist():
            raise UserError(f"{file} does not hold the states of the prompt that was sent; {start}")
        if states_TKD.dim() != 3 or states_TKD.shape[1] != len(ids):
            raise UserError(f"{self.place} gives states of shape {tuple(states_TKD.shape)}, and {len(ids)} of each "
                            f"token are asked for; {start}")
        states = {name: states_TKD[:, ids.index(layer)] for name, layer in layers.items() if name != FINAL}
        return {FINAL: self.target.normed(states_TKD[:, ids.index(last)]), **states}

    def _read(self, file: Path) -> dict[str, Tensor]:
        """The tensors of a file, which then goes; its writer holds a lock until it is whole."""
        lock, until = Path(f"{file}.lock"), time.monotonic() + ANSWER_SECONDS
        try:
            with lock.open() as held:
                while True:
                    try:
                        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > until:
                            raise UserError(f"{self.place} does not finish {file}; {AGAIN}") from None
                        time.sleep(POLL_SECONDS)
                found: dict[str, Tensor] = load_file(file)
            for one in (file, lock):
                one.unlink()
        except (OSError, SafetensorError) as error:
            raise UserError(f"the states that {self.place} has written cannot be read and removed ({file}: "
                            f"{error}); its shared_storage_path must be a folder that this machine sees under the same "
                            f"name, with room: {AGAIN}") from error
        return found


PROBE = "probe.safetensors"  # The target's own states, kept with the data: computed once, where the target is
ROWS, TOKENS = 4, 64  # Rows of the trial, and most tokens of each
BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 0.01, torch.bfloat16: 0.06}
"""Largest difference that the coarser of two number formats explains: the median over tokens, as a share of the
state's length. After thirty layers of the embedded target bfloat16 makes 0.02; neighbouring layers differ by 0.2."""


def engine_at(place: str, target: Target) -> StateEngine:
    """The engine of `distill.states_from`. Raises UserError if that is neither an address nor a folder."""
    return (VllmEngine if "://" in place else FolderEngine)(place, target)


def probe(engine: StateEngine, encoding: Encoding) -> str:
    """Compare an engine's states of the first rows with the target's own; returns how much they differ, in words.
    Raises UserError naming the first kind of states that are others, and what they are."""
    shard, reference = own_states(encoding)
    target, names, rows = encoding.target, encoding.names, range(shard.num_rows)
    read = engine(shard, rows, names, target.dtype)
    # Of two formats the coarser one rounds.
    bound = max(BOUNDS.get(dtype, BOUNDS[torch.bfloat16]) for dtype in (engine.dtype, target.dtype))
    widest = 0.0
    for name in names:
        found_TD = torch.cat([read[row][name] for row in rows])
        gaps = {other: gap(found_TD, own_TD) for other, own_TD in reference.items()}
        nearest = min(gaps, key=lambda other: gaps[other])
        # Large models change their states little from layer to layer: another may be within the bound as well.
        if nearest != name and gaps[nearest] <= min(bound, gaps[name] / 2):
            raise UserError(f"{engine.place} gives {_words(nearest, target)} where {_words(name, target)} is asked "
                            "for; correct the layers that it takes, or its last norm")
        if not gaps[name] <= bound:
            kind = str(engine.dtype).removeprefix("torch.")
            raise UserError(f"{engine.place} does not give the target's states: {_words(name, target)} differs by "
                            f"{gaps[name]:.2g} of its length, and rounding in {kind} explains {bound:g}; serve "
                            f"{target.identity.name}")
        widest = max(widest, gaps[name])
    return f"within {widest:.2g} of their length (rounding explains {bound:g})"


def own_states(encoding: Encoding) -> tuple[TokenShard, dict[str, Tensor]]:
    """(the beginnings of the first rows of the data, the target's states there by name, [T, D] each): those that are
    asked for, and what may be given in their place. Raises UserError if the disk is full."""
    record, target, store = encoding.records[0], encoding.target, encoding.store
    shard = TokenShard.read(encoding.folder / record.file, record.sha256)
    spans = [shard.span(row) for row in range(min(ROWS, shard.num_rows))]
    texts = [shard.tokens_T[start : min(stop, start + TOKENS)].tolist() for start, stop in spans]
    shard = TokenShard.from_rows([Row(tokens=tuple(text), supervised=(True,) * len(text), prompt=number)
                                  for number, text in enumerate(texts)], [])
    asked = [int(name.removeprefix("tap_")) for name in encoding.names if name != FINAL]
    near = {layer + step for layer in asked for step in (-1, 0, 1)} | {target.num_layers - 1}
    names = (FINAL, *map(tap, sorted(near & set(range(target.num_layers)))))
    key = hashlib.sha256(repr([names, shard.tokens_T.tolist(), shard.starts_S.tolist()]).encode()).hexdigest()
    if not store.holds(PROBE, key):
        read = read_rows(target, shard, range(shard.num_rows), names, target.dtype)
        states = {name: torch.cat([read[row][name] for row in sorted(read)]) for name in names}
        store.add({PROBE: StoredFile(tokens=key, sha256=write_tensors(encoding.folder / PROBE, states))})
    return shard, load_file(Path(encoding.folder, PROBE))


def gap(found_TD: Tensor, own_TD: Tensor) -> float:
    """Median over tokens of the difference of two states, as a share of the length of the second."""
    lengths_T = own_TD.float().norm(dim=-1).clamp(min=1e-12)
    return float(((found_TD.float() - own_TD.float()).norm(dim=-1) / lengths_T).median())


def _words(name: str, target: Target) -> str:
    """A kind of states in words."""
    if name == FINAL:
        return "the last state, after the last norm,"
    before = ", the last one, before the norm," if name == tap(target.num_layers - 1) else ""
    return f"the output of layer {name.removeprefix('tap_')}{before}"
