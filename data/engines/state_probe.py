"""The trial of an engine that gives states: those of a few rows next to the target's own, before any others are stored.

Shapes: T tokens of the rows, D hidden size.
"""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...modules import Target, UserError
from ..store.feature_shards import FINAL, tap
from ..store.feature_store import Encoding, read_rows
from ..store.token_store import Row, TokenShard
from .folder_engine import FolderEngine
from .state_engine import StateEngine
from .vllm_engine import VllmEngine

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
        store.keep(PROBE, key, {name: torch.cat([read[row][name] for row in sorted(read)]) for name in names})
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
