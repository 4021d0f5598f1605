"""One table of the drafter families for the tests that every family must pass: a family added there is tested here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.modules import (
    Adapter,
    Drafter,
    DraftLM,
    DraftLMConfig,
    Eagle,
    Eagle3,
    Eagle3Config,
    EagleConfig,
    Falcon,
    FalconConfig,
    Hydra,
    HydraConfig,
    Medusa,
    MedusaConfig,
    Target,
)
from draftsmith.modules.target.adapter import LowRank, choose_layers
from draftsmith.trainers import DraftModule
from draftsmith.trainers.draft_lm import DraftLMModule, DraftLMTrainConfig
from draftsmith.trainers.eagle import EagleModule, EagleTrainConfig
from draftsmith.trainers.eagle3 import Eagle3Module, Eagle3TrainConfig
from draftsmith.trainers.falcon import FalconModule, FalconTrainConfig
from draftsmith.trainers.hydra import HydraModule, HydraTrainConfig
from draftsmith.trainers.lora import LoraConfig
from draftsmith.trainers.medusa import MedusaModule, MedusaTrainConfig
from draftsmith.trainers.medusa2 import Medusa2Module, Medusa2TrainConfig

IDS = torch.tensor([0, 1, 2, 5, 9, *range(28, 48), 60])
"""A reduced vocabulary that holds the cycle of tests/cycle.py."""


def _unchanged(_target: Target) -> None:
    """Most families leave the target alone."""


@dataclass(frozen=True)
class Case:
    """How tests make one kind of drafter beside a tiny target."""

    make: Callable[[Target], Drafter]
    """A new drafter, bound to the target that verifies its drafts."""
    module: Callable[..., DraftModule]
    """Its LightningModule, from (target, **training settings)."""
    change: Callable[[Target], Adapter | None] = _unchanged
    """How its training might have changed the target, where the target learns too: the same every time."""

    def judge(self, target: Target) -> Target:
        """The target that verifies its drafts: the given one, or a changed copy of it."""
        adapter = self.change(target)
        return target if adapter is None else target.adapted(adapter)


def randomised(drafter: Drafter) -> Drafter:
    """The same with weights that are no longer a special case."""
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += (0.3 if parameter.ndim == 1 else 0.3 / parameter.shape[-1] ** 0.5) * noise.to(parameter)
    return drafter.eval()


def _counts(target: Target, ids: torch.Tensor | None) -> torch.Tensor:
    """Labels of training data in which only these tokens occur."""
    counts = torch.zeros(target.vocab_size)
    if ids is not None:
        counts[ids] = 1.0
    return counts


def _medusa(config: MedusaConfig, ids: torch.Tensor | None = None) -> Case:
    def module(target: Target, **settings: Any) -> DraftModule:
        return MedusaModule(target, MedusaTrainConfig(drafter=config, **settings), token_counts=_counts(target, ids))

    return Case(make=lambda target: Medusa.create(config, target, ids), module=module)


def _medusa2(config: MedusaConfig, lora: LoraConfig) -> Case:
    def module(target: Target, **settings: Any) -> DraftModule:
        # The cycle is not the original's own text: held to the original, the target would not learn it.
        given = {"keep": "text", "first_stage": 0.25, "heads_weight": 1.0, "lora": lora} | settings
        return Medusa2Module(target, Medusa2TrainConfig(drafter=config, **given))

    def change(target: Target) -> Adapter:
        generator = torch.Generator().manual_seed(4)
        layers = {}
        for name in choose_layers(target.model, lora.modules, without=target.head):
            outputs, inputs = target.model.get_submodule(name).weight.shape
            a_RI = torch.randn(lora.rank, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
            b_OR = 0.3 * torch.randn(outputs, lora.rank, generator=generator, dtype=torch.float64)
            layers[name] = LowRank(a_RI=a_RI.to(target.dtype), b_OR=b_OR.to(target.dtype))
        return Adapter(layers, lora.alpha / lora.rank)

    return Case(make=lambda target: Medusa.create(config, target), module=module, change=change)


def _hydra(config: HydraConfig, ids: torch.Tensor | None = None) -> Case:
    def module(target: Target, **settings: Any) -> DraftModule:
        return HydraModule(target, HydraTrainConfig(drafter=config, **settings), token_counts=_counts(target, ids))

    return Case(make=lambda target: Hydra.create(config, target, ids), module=module)


def _eagle(config: EagleConfig, ids: torch.Tensor | None = None) -> Case:
    def module(target: Target, **settings: Any) -> DraftModule:
        # The cycle is not the target's own text: its distributions and states are no help. Where a state is kept for
        # them alone they are no hindrance.
        given = {"objective": "hard", "feature_weight": float(config.partial_alignment)} | settings
        return EagleModule(target, EagleTrainConfig(drafter=config, **given), token_counts=_counts(target, ids))

    return Case(make=lambda target: Eagle.create(config, target, ids), module=module)


def _eagle3(config: Eagle3Config, ids: torch.Tensor | None = None) -> Case:
    def module(target: Target, **settings: Any) -> DraftModule:
        given = {"objective": "hard"} | settings
        return Eagle3Module(target, Eagle3TrainConfig(drafter=config, **given), token_counts=_counts(target, ids))

    return Case(make=lambda target: Eagle3.create(config, target, ids), module=module)


def _falcon(config: FalconConfig, ids: torch.Tensor | None = None) -> Case:
    def module(target: Target, **settings: Any) -> DraftModule:
        # See _eagle.
        given = {"objective": "hard", "feature_weight": 0.0} | settings
        return FalconModule(target, FalconTrainConfig(drafter=config, **given), token_counts=_counts(target, ids))

    return Case(make=lambda target: Falcon.create(config, target, ids), module=module)


def _draft_lm(config: DraftLMConfig, ids: torch.Tensor | None = None) -> Case:
    def module(target: Target, **settings: Any) -> DraftModule:
        return DraftLMModule(target, DraftLMTrainConfig(drafter=config, **settings), token_counts=_counts(target, ids))

    return Case(make=lambda target: DraftLM.create(config, target, ids), module=module)


CASES: dict[str, Case] = {
    "medusa": _medusa(MedusaConfig(num_heads=3, num_layers=3)),
    "medusa-copy": _medusa(MedusaConfig(num_heads=2, output="copy")),
    "medusa-copy-reduced": _medusa(MedusaConfig(num_heads=2, num_layers=2, output="copy", vocabulary_size=len(IDS)),
                                   IDS),
    "medusa-2": _medusa2(MedusaConfig(num_heads=3), LoraConfig(rank=4, alpha=8.0)),
    "medusa-2-copy": _medusa2(MedusaConfig(num_heads=2, output="copy"),
                              LoraConfig(rank=2, alpha=4.0, modules=("q_proj", "down_proj", "lm_head"))),
    "hydra": _hydra(HydraConfig(num_heads=3)),
    "hydra-copy-reduced": _hydra(HydraConfig(num_heads=2, num_layers=3, tie_blocks=False, output="copy",
                                             vocabulary_size=len(IDS)), IDS),
    "hydra++": _hydra(HydraConfig(num_heads=3, num_layers=4, prefix=True, dropout=0.1)),
    "eagle": _eagle(EagleConfig()),
    "eagle-hass-reduced": _eagle(EagleConfig(steps=3, bias=False, noise=0.1, vocabulary_size=len(IDS)), IDS),
    "eagle-sampling": _eagle(EagleConfig(feature_sampling=True)),
    "eagle-partial": _eagle(EagleConfig(partial_alignment=True, steps=2)),
    "eagle-fspad-reduced": _eagle(EagleConfig(feature_sampling=True, partial_alignment=True,
                                              vocabulary_size=len(IDS)), IDS),
    "eagle3": _eagle3(Eagle3Config(steps=3)),
    "eagle3-shared": _eagle3(Eagle3Config(steps=2, taps=(1,), output="shared", norm_output=True)),
    "eagle3.1": _eagle3(Eagle3Config(steps=3, fc_norm=True, norm_output=True)),
    "eagle3-layers": _eagle3(Eagle3Config(steps=3, num_layers=2, vocabulary_size=len(IDS)), IDS),
    "eagle3-narrow": _eagle3(Eagle3Config(steps=3, fc_norm=True, hidden_size=24, target_hidden_size=32)),
    "eagle3-reduced": _eagle3(Eagle3Config(steps=4, vocabulary_size=len(IDS)), IDS),
    "falcon": _falcon(FalconConfig()),
    "falcon-blocks-reduced": _falcon(FalconConfig(block_size=3, blocks=2, noise=0.1, vocabulary_size=len(IDS)), IDS),
    "falcon-official": _falcon(FalconConfig(block_size=4, skip=False, rope_base=10_000.0)),
    "draft-lm": _draft_lm(DraftLMConfig(num_layers=2, hidden_size=24)),
    "draft-lm-exits-reduced": _draft_lm(DraftLMConfig(layers=(0, 1), exits=(1, 2), vocabulary_size=len(IDS),
                                                      freeze_embedding=True), IDS),
    "draft-lm-depths": _draft_lm(DraftLMConfig(num_layers=2, hidden_size=32, depths=3, tied=True)),
}
