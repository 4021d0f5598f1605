"""Frozen targets, drafters and the one decoding loop."""

from .acceptance import Accepted, Sampling, choose, follow
from .baselines import BASELINES, baseline
from .calibration import Acceptance, decoded_acceptance, rank_table, replay, search_tree
from .cost import CostCurve, TreeChoice, choose_size, measure_cost
from .decode import Loop, decode, stream
from .drafter import Drafter, Drafts, DraftState, Frontier, Observation, Proposer, Scores, Verified
from .ensemble import Ensemble, Union
from .errors import UserError
from .features import Features
from .identity import TargetIdentity
from .layers import LayerDraft, search_layers
from .loading import DEFAULT_NAME, TargetConfig, load_target
from .lookup import Lookup, LookupConfig
from .medusa import Medusa, MedusaConfig
from .ngram import NgramConfig, Ngrams
from .policies import Chain, Policy, StaticTree
from .recycling import Recycling, recycling_tree
from .replay import Replay
from .requests import DecodeResult, DecodeSettings, DecodeStats, Generation, Request
from .target import PassOutput, Target, TargetRows
from .tree import TokenTree, Topology

DRAFTERS: tuple[type[Drafter], ...] = (Medusa,)
"""Every drafter family; contract, losslessness, artifact and recipe tests run over this tuple."""

__all__ = [
    "BASELINES",
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
    "Ensemble",
    "Features",
    "Frontier",
    "Generation",
    "LayerDraft",
    "Lookup",
    "LookupConfig",
    "Loop",
    "Medusa",
    "MedusaConfig",
    "NgramConfig",
    "Ngrams",
    "Observation",
    "PassOutput",
    "Policy",
    "Proposer",
    "Recycling",
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
    "Union",
    "UserError",
    "Verified",
    "baseline",
    "choose",
    "choose_size",
    "decode",
    "decoded_acceptance",
    "follow",
    "load_target",
    "measure_cost",
    "rank_table",
    "recycling_tree",
    "replay",
    "search_layers",
    "search_tree",
    "stream",
]
