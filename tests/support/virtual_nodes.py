"""Virtual nodes for trees that a test builds by hand."""

import torch
from draftsmith.modules.token_tree import VirtualNodes
from torch import Tensor


def unplaced(embedded_BMD: Tensor) -> VirtualNodes:
    """Virtual nodes with these embeddings whose places the tree itself says; no node is named as their anchor."""
    slots_BM = torch.arange(embedded_BMD.shape[1]).expand(embedded_BMD.shape[:2])
    return VirtualNodes(embedded_BMD=embedded_BMD, anchors_BM=torch.full_like(slots_BM, -1), slots_BM=slots_BM,
                        slots=embedded_BMD.shape[1])
