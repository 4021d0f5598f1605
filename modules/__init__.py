"""Frozen targets, drafters and the one decoding loop."""

from .acceptance import Accepted, Sampling, choose, follow
from .adapter import Adapter
from .baselines import BASELINES, baseline
from .calibration import Acceptance, decoded_acceptance, expected_lengths, replay, search_tree
from .confidence import Confidence, ConfidenceBin, ConfidenceCurve, replay_noting
from .cost import CostCurve, CostModel, Sample, TreeChoice, choose_size
from .decode import Loop, decode, stream
from .draft_lm import DraftLM
from .draft_lm_shape import DraftLMConfig
from .drafter import Drafter, Drafts, DraftState, Frontier, Observation, Proposer, Scores, Verified
from .drafting import POLICIES, STATIC, parse_policy, policy_named
from .dynamic import DySpecTree, Eagle2Tree
from .eagle import Eagle, EagleConfig
from .eagle3 import Eagle3, Eagle3Config
from .ensemble import Ensemble, Union
from .errors import TreeError, UserError
from .falcon import Falcon, FalconConfig
from .faults import DecodeError
from .features import Features
from .hydra import Hydra
from .hydra_heads import HydraConfig
from .identity import TargetIdentity
from .layers import LayerDraft, search_layers
from .loading import DEFAULT_NAME, TargetConfig, load_target
from .lookup import Lookup, LookupConfig
from .medusa import Medusa, MedusaConfig
from .ngram import NgramConfig, Ngrams
from .policies import Chain, Policy, StaticTree
from .proposals import chance_table, rank_table
from .recycling import Recycling, recycling_tree
from .replay import Replay
from .requests import DecodeResult, DecodeSettings, DecodeStats, Generation, Request, repeats_itself
from .rules import ChainRejection, Chances, Equality, Rejection, Rule, Typical, exact_rule
from .sampled import SampledTree
from .stopped import (
    AdaptiveThreshold,
    Drafted,
    EarlyExit,
    FixedLength,
    MaxProbability,
    PathProbability,
    SampledChain,
    StoppedChain,
    StoppingRule,
)
from .streams import Draws
from .target import PassOutput, Target, TargetRows
from .timing import measure_cost
from .tree import Drawn, TokenTree, Topology

DRAFTERS: tuple[type[Drafter], ...] = (Medusa, Hydra, Eagle, Eagle3, Falcon, DraftLM)
"""Every drafter family; contract, losslessness, artifact and recipe tests run over this tuple."""

__all__ = [
    "BASELINES",
    "DEFAULT_NAME",
    "DRAFTERS",
    "POLICIES",
    "STATIC",
    "Acceptance",
    "Accepted",
    "Adapter",
    "AdaptiveThreshold",
    "Chain",
    "ChainRejection",
    "Chances",
    "Confidence",
    "ConfidenceBin",
    "ConfidenceCurve",
    "CostCurve",
    "CostModel",
    "DecodeError",
    "DecodeResult",
    "DecodeSettings",
    "DecodeStats",
    "DraftLM",
    "DraftLMConfig",
    "DraftState",
    "Drafted",
    "Drafter",
    "Drafts",
    "Drawn",
    "Draws",
    "DySpecTree",
    "Eagle",
    "Eagle2Tree",
    "Eagle3",
    "Eagle3Config",
    "EagleConfig",
    "EarlyExit",
    "Ensemble",
    "Equality",
    "Falcon",
    "FalconConfig",
    "Features",
    "FixedLength",
    "Frontier",
    "Generation",
    "Hydra",
    "HydraConfig",
    "LayerDraft",
    "Lookup",
    "LookupConfig",
    "Loop",
    "MaxProbability",
    "Medusa",
    "MedusaConfig",
    "NgramConfig",
    "Ngrams",
    "Observation",
    "PassOutput",
    "PathProbability",
    "Policy",
    "Proposer",
    "Recycling",
    "Rejection",
    "Replay",
    "Request",
    "Rule",
    "Sample",
    "SampledChain",
    "SampledTree",
    "Sampling",
    "Scores",
    "StaticTree",
    "StoppedChain",
    "StoppingRule",
    "Target",
    "TargetConfig",
    "TargetIdentity",
    "TargetRows",
    "TokenTree",
    "Topology",
    "TreeChoice",
    "TreeError",
    "Typical",
    "Union",
    "UserError",
    "Verified",
    "baseline",
    "chance_table",
    "choose",
    "choose_size",
    "decode",
    "decoded_acceptance",
    "exact_rule",
    "expected_lengths",
    "follow",
    "load_target",
    "measure_cost",
    "parse_policy",
    "policy_named",
    "rank_table",
    "recycling_tree",
    "repeats_itself",
    "replay",
    "replay_noting",
    "search_layers",
    "search_tree",
    "stream",
]
