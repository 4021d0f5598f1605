"""Rotary parameters of a configuration, by kind of layer."""

from collections.abc import Mapping
from typing import Any


def rope_by_kind(said: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The rotary parameters of each kind of layer; of the kind "" where all layers have the same, or none. transformers
    nests them in `rope_parameters` by the names in `layer_types` where the layers differ (Gemma 3, OLMo 3)."""
    nested = {kind: own for kind, own in (said or {}).items() if isinstance(own, dict)}
    return nested or {"": dict(said or {})}
