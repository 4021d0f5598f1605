"""Medusa heads alone, and trained with the target (Medusa-2)."""

import torch
from draftsmith.modules import Adapter, Medusa, MedusaConfig, Target
from draftsmith.modules.target.adapter import LowRank, choose_layers
from draftsmith.trainers.medusa2 import ALPHA, LoraConfig, Medusa2Module
from support.cases import IDS, Case, case


def _with_target(config: MedusaConfig, rank: int) -> Case:
    """Medusa-2, decoding with a target that has changed."""
    heads = case(Medusa, config, module=Medusa2Module, lora=LoraConfig(rank=rank))

    def change(target: Target) -> Adapter:
        generator = torch.Generator().manual_seed(4)
        layers = {}
        for name in choose_layers(target.model, (), without=target.head):
            outputs, inputs = target.model.get_submodule(name).weight.shape
            a_RI = torch.randn(rank, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
            b_OR = 0.6 * rank / ALPHA * torch.randn(outputs, rank, generator=generator, dtype=torch.float64)
            layers[name] = LowRank(a_RI=a_RI.to(target.dtype), b_OR=b_OR.to(target.dtype))
        return Adapter(layers, ALPHA / rank)

    return Case(make=heads.make, module=heads.module, change=change)


CASES = {
    "medusa": case(Medusa, MedusaConfig(num_heads=3, num_layers=3)),
    "medusa-copy": case(Medusa, MedusaConfig(num_heads=2, output="copy")),
    "medusa-copy-reduced": case(Medusa, MedusaConfig(
        num_heads=2, num_layers=2, output="copy", vocabulary_size=len(IDS)), IDS),
    "medusa-one-copy": case(Medusa, MedusaConfig(num_heads=3, output="one_copy", vocabulary_size=len(IDS)), IDS),
    "medusa-2": _with_target(MedusaConfig(num_heads=3), rank=4),
    "medusa-2-copy": _with_target(MedusaConfig(num_heads=2, output="copy"), rank=2),
}
