"""Drafters of blocks: both alignments, causal or not, without a correction and with one."""

from dataclasses import replace

import torch
from draftsmith.modules import BlockDraft, BlockDraftConfig
from support.cases import IDS, Case, case


def _block(config: BlockDraftConfig, ids: torch.Tensor | None = None) -> Case:
    # The cycle is not the target's own text: its distributions do not help. Slots start from masks and learn slowly.
    return replace(case(BlockDraft, config, ids, objective="hard"), steps=160)


CASES = {
    "block": _block(BlockDraftConfig(block_size=4, num_layers=1, anchors=24)),
    "block-same-reduced": _block(BlockDraftConfig(block_size=4, aligned="same", causal=False,
                                                  vocabulary_size=len(IDS)), IDS),
    "block-window": _block(BlockDraftConfig(block_size=4, aligned="same", causal=False, num_layers=1, window=6)),
    "block-markov": _block(BlockDraftConfig(block_size=3, correction="markov", rank=16)),
    "block-selector": _block(BlockDraftConfig(block_size=3, aligned="same", correction="selector", rank=8, conv=True)),
    "block-refiner": _block(BlockDraftConfig(block_size=4, aligned="same", correction="refiner", rank=8)),
    "block-gru": _block(BlockDraftConfig(block_size=3, correction="gru", rank=4)),
    "block-state-reduced": _block(BlockDraftConfig(block_size=4, correction="state", rank=24, residual=True,
                                                   vocabulary_size=len(IDS)), IDS),
    "block-rnn-reduced": _block(BlockDraftConfig(block_size=4, aligned="same", correction="rnn", rank=8,
                                                 vocabulary_size=len(IDS)), IDS),
}
