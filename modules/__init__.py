"""Frozen targets, drafters and the one decoding loop."""

from .acceptance import Accepted, Sampling, choose, follow
from .calibration import Acceptance, decoded_acceptance, rank_table, replay, search_tree
from .cost import CostCurve, TreeChoice, choose_size, measure_cost
from .decode import Loop, decode, stream
from .drafter import Drafter, Drafts, DraftState, Frontier, Observation, Scores
from .errors import UserError
from .features import Features
from .identity import TargetIdentity
from .loading import DEFAULT_NAME, TargetConfig, load_target
from .medusa import Medusa, MedusaConfig
from .policies import Chain, Policy, StaticTree
from .replay import Replay
from .requests import DecodeResult, DecodeSettings, DecodeStats, Generation, Request
from .target import PassOutput, Target, TargetRows
from .tree import TokenTree, Topology

DRAFTERS: tuple[type[Drafter], ...] = (Medusa,)
"""Every drafter family; contract, losslessness, artifact and recipe tests run over this tuple."""

__all__ = [
    "DEFAULT_NAME",
    "DRAFTERS",
    "Acceptance",
    "Accepted",
    "Chain",
    "CostCurve",
    "DecodeResult",
    "DecodeSettings",
    "DecodeStats",
    "DraftState",
    "Drafter",
    "Drafts",
    "Features",
    "Frontier",
    "Generation",
    "Loop",
    "Medusa",
    "MedusaConfig",
    "Observation",
    "PassOutput",
    "Policy",
    "Replay",
    "Request",
    "Sampling",
    "Scores",
    "StaticTree",
    "Target",
    "TargetConfig",
    "TargetIdentity",
    "TargetRows",
    "TokenTree",
    "Topology",
    "TreeChoice",
    "UserError",
    "choose",
    "choose_size",
    "decode",
    "decoded_acceptance",
    "follow",
    "load_target",
    "measure_cost",
    "rank_table",
    "replay",
    "search_tree",
    "stream",
]
