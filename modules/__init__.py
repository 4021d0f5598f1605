"""Frozen targets, drafters and the one decoding loop."""

from .errors import UserError
from .features import Features
from .identity import TargetIdentity
from .loading import DEFAULT_NAME, TargetConfig, load_target
from .target import PassOutput, Target, TargetRows
from .tree import TokenTree, Topology

__all__ = [
    "DEFAULT_NAME", "Features", "PassOutput", "Target", "TargetConfig", "TargetIdentity", "TargetRows", "TokenTree",
    "Topology", "UserError", "load_target",
]
