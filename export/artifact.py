"""The artifact: a trained drafter, its tree and where it came from, in one folder without a pickle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..modules import Drafter, StaticTree, Target, TargetIdentity, Topology

FORMAT_VERSION = 1
"""Raised when a reader of the previous version could not read the new files."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What was measured on one machine: it may be absent, and another machine measures its own."""

    device: str
    """Device the passes ran on, for people: "cpu (2 threads)"."""
    dtype: str
    """Number format of the target, such as float32."""
    tree_size: int
    """Nodes of the tree that decode fastest here, root included; a prefix of the artifact's tree."""
    pass_seconds: tuple[tuple[int, float], ...]
    """Cost curve: (tokens in a target pass, median seconds)."""
    draft_seconds: float
    """Median seconds of drafting one tree."""
    expected_accepted_length: tuple[float, ...] = ()
    """Estimated tokens per pass for a tree of 1, 2, 3 ... nodes; empty when it was not computed."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A drafter ready to decode beside its target."""

    drafter: Drafter
    """The drafter, bound to the target it was loaded beside."""
    topology: Topology
    """The static tree in best-first order: any prefix of it is the best smaller tree."""
    identity: TargetIdentity
    """The target it belongs to."""
    provenance: dict[str, Any]
    """Recipe, data manifest hash, measured acceptance, versions."""
    tuning: Tuning | None = None
    """What was measured on this machine, if anything was."""

    @property
    def tree_size(self) -> int:
        """Nodes drafted by default, root included."""
        raise NotImplementedError

    def policy(self, size: int | None = None) -> StaticTree:
        """How this artifact drafts: its tree, cut to `size` nodes (default: the tuned size, else the whole)."""
        raise NotImplementedError


def save_artifact(folder: Path, drafter: Drafter, identity: TargetIdentity, provenance: dict[str, Any],
                  topology: Topology) -> Path:
    """Write config.json, model.safetensors and README.md; the bytes depend on the arguments and versions alone."""
    raise NotImplementedError


def save_tuning(folder: Path, tuning: Tuning) -> Path:
    """Write or replace tuning.json of an artifact."""
    raise NotImplementedError


def read_description(folder: Path) -> dict[str, Any]:
    """config.json of an artifact, its format version checked. Needs no target and loads no weights."""
    raise NotImplementedError


def load_artifact(folder: Path, target: Target, *, trust: bool = False) -> Artifact:
    """Load an artifact beside its target and bind it."""
    raise NotImplementedError
