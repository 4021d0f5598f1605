"""Frozen targets, drafters and the one decoding loop; a name is imported with its file once somebody asks for it."""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .baselines.memories import Ngrams, PromptLookup, TokenRecycling
    from .baselines.registry import BASELINES, JOINED, PARTNERS, LayerDraft, baseline, parse_joined
    from .decoding.answers import decode, stream
    from .decoding.loop import Loop
    from .decoding.requests import DecodeResult, DecodeSettings, DecodeStats, Generation, Request, TokenText
    from .decoding.verifier import DecodeError
    from .errors import TreeError, UserError
    from .families.block.drafter import BlockDraft
    from .families.block.settings import BlockDraftConfig
    from .families.draft_lm.drafter import DraftLM
    from .families.draft_lm.settings import DraftLMConfig
    from .families.eagle.drafter import Eagle, EagleConfig
    from .families.eagle3.drafter import Eagle3, Eagle3Config
    from .families.falcon.drafter import Falcon, FalconConfig
    from .families.hidden_transfer.drafter import HiddenTransfer, HiddenTransferConfig
    from .families.hydra.drafter import Hydra, HydraConfig
    from .families.kangaroo.drafter import Kangaroo, KangarooConfig
    from .families.medusa.drafter import Medusa, MedusaConfig
    from .families.mtp.drafter import Mtp, MtpConfig
    from .families.p_eagle.drafter import PEagle, PEagleConfig
    from .families.prompt_tokens.drafter import PromptTokens, PromptTokensConfig
    from .families.registry import DRAFTERS
    from .features import Features
    from .interfaces.drafter import Drafter, Drafts
    from .interfaces.proposer import DraftState, Frontier, Observation, Proposer, Scores, Verified
    from .parts.heads import AcceptanceHead, AcceptanceHeadConfig
    from .policies.base import Policy
    from .policies.ensemble import Ensemble, Union
    from .policies.registry import FASTEST, NONE, POLICIES, SPARSE, SPECDEC, STATIC, parse_policy, policy_named
    from .policies.stopping_chains import (
        Drafted,
        MaxProbability,
        PathProbability,
        RejectionRisk,
        SampledChain,
        StoppedChain,
        StoppingRule,
    )
    from .policies.trees import BeamTree, Chain, DySpecTree, Eagle2Tree, SampledTree, StaticTree
    from .target.adapter import Adapter
    from .target.loading.loading import DEFAULT_NAME, TargetConfig, load_target
    from .target.loading.model_parts import TargetIdentity
    from .target.model import Target
    from .target.target_rows import PassOutput, TargetRows
    from .token_tree import Drawn, TokenTree, Topology
    from .tuning.acceptance_examples import Examples, chain_for, rollouts
    from .tuning.replayed_answers import Replay
    from .tuning.step_timing import CostCurve, CostTable, measure_cost
    from .tuning.tree_search import Acceptance, MeasuredStep, RankedText, answered_anew, ranked_text
    from .tuning.trials import SIZING_TEMPERATURE, Counted, Trial, trials
    from .verification.acceptance_rules import Accepted, Chances, Equality, Rejection, Rule, Typical
    from .verification.sampling import Draws, Sampling, SamplingSetting, choose
else:
    # By the imports above, which would load torch: what reads settings and prints help does without.
    FILES = {alias.name: f".{node.module}" for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
             if isinstance(node, ast.ImportFrom) and node.level for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(FILES[name], __name__), name))

__all__ = [
    "BASELINES", "DEFAULT_NAME", "DRAFTERS", "FASTEST", "JOINED", "NONE", "PARTNERS", "POLICIES",
    "SIZING_TEMPERATURE", "SPARSE", "SPECDEC", "STATIC", "Acceptance", "AcceptanceHead", "AcceptanceHeadConfig",
    "Accepted", "Adapter", "BeamTree", "BlockDraft", "BlockDraftConfig", "Chain", "Chances", "CostCurve", "CostTable",
    "Counted", "DecodeError", "DecodeResult", "DecodeSettings", "DecodeStats", "DraftLM", "DraftLMConfig",
    "DraftState", "Drafted", "Drafter", "Drafts", "Drawn", "Draws", "DySpecTree", "Eagle", "Eagle2Tree", "Eagle3",
    "Eagle3Config", "EagleConfig", "Ensemble", "Equality", "Examples", "Falcon", "FalconConfig", "Features",
    "Frontier", "Generation", "HiddenTransfer", "HiddenTransferConfig", "Hydra", "HydraConfig", "Kangaroo",
    "KangarooConfig", "LayerDraft", "Loop", "MaxProbability", "MeasuredStep", "Medusa", "MedusaConfig", "Mtp",
    "MtpConfig", "Ngrams", "Observation", "PEagle", "PEagleConfig", "PassOutput", "PathProbability", "Policy",
    "PromptLookup", "PromptTokens", "PromptTokensConfig", "Proposer", "RankedText", "Rejection",
    "RejectionRisk", "Replay", "Request", "Rule", "SampledChain", "SampledTree", "Sampling",
    "SamplingSetting", "Scores", "StaticTree", "StoppedChain", "StoppingRule", "Target", "TargetConfig",
    "TargetIdentity", "TargetRows", "TokenRecycling", "TokenText", "TokenTree", "Topology", "TreeError", "Trial",
    "Typical", "Union", "UserError", "Verified", "answered_anew", "baseline", "chain_for", "choose", "decode",
    "load_target", "measure_cost", "parse_joined", "parse_policy", "policy_named", "ranked_text", "rollouts",
    "stream", "trials",
]
