"""The results of a verified pass: tokens for the host, an observation for the drafter.

Shapes: B rows, N nodes, K nodes of a path, M virtual nodes, S virtual nodes of one node, D hidden size.
"""

import torch
from torch import Tensor

from ..interfaces.proposer import AheadStates, Observation, Verified
from ..target.pass_output import PassOutput
from ..token_tree import TokenTree
from ..verification.tree_walk import Accepted


def for_host(tree: TokenTree, accepted: Accepted, faults_B: Tensor) -> Tensor:
    """All that the host has to know of a pass, in one tensor [B, 3 + K]: see `read`."""
    path_tokens_BK = tree.tokens_BN.gather(1, accepted.path_BK)
    columns = [accepted.counts_B[:, None], faults_B[:, None], accepted.bonus_B[:, None], path_tokens_BK]
    return torch.cat(columns, dim=1)


def read(host_BX: Tensor) -> tuple[list[list[int]], list[int], list[int]]:
    """(new tokens of each row: accepted nodes below the root and, in sound rows, the bonus; nodes on each path;
    faults), in one transfer."""
    together = host_BX.tolist()
    emitted = [[*row[4 : 3 + row[0]], *([] if row[1] else [row[2]])] for row in together]
    return emitted, [row[0] for row in together], [row[1] for row in together]


def observation(
    tree: TokenTree, accepted: Accepted, output: PassOutput, counts: list[int], answers: Verified | None = None
) -> Observation:
    """The drafter's view of a pass of the first rows: tokens and states of the accepted path, the target's logits if
    it reads them.

    Args:
        tree: what the target ran, virtual nodes included.
        accepted: the paths; one of no node in rows that hold no sequence.
        output: the states.
        counts: nodes on each path, on the host.
        answers: the logits.
    """
    path_BK = accepted.path_BK
    last_B = path_BK.gather(1, (accepted.counts_B[:, None] - 1).clamp(min=0))[:, 0]

    def along(states_BND: Tensor) -> Tensor:
        return states_BND.gather(1, path_BK[..., None].expand(-1, -1, states_BND.shape[-1]))

    return Observation(
        tokens_BN=tree.tokens_BN.gather(1, path_BK),
        counts_B=accepted.counts_B,
        final_BND=along(output.final_BND),
        taps={layer: along(states) for layer, states in output.taps.items()},
        roots_B=accepted.bonus_B,
        verified=answers,
        ahead=ahead_states(tree, output, last_B),
        host_rows=list(range(len(counts))),
        host_counts=counts,
    )


def ahead_states(tree: TokenTree, output: PassOutput, nodes_B: Tensor) -> AheadStates | None:
    """The target's states at the virtual nodes after one node of each row; None for a tree without virtual nodes."""
    virtual = tree.virtual
    if virtual is None:
        return None
    slots_S = torch.arange(virtual.slots, device=nodes_B.device)
    ours_BSM = (virtual.slots_BM[:, None] == slots_S[:, None]) & (virtual.anchors_BM == nodes_B[:, None])[:, None]
    final_BMD = output.final_BND[:, -virtual.anchors_BM.shape[1] :]
    places_BS = ours_BSM.long().argmax(-1)
    states_BSD = final_BMD.gather(1, places_BS[..., None].expand(-1, -1, final_BMD.shape[-1]))
    return AheadStates(states_BSD=states_BSD, present_BS=ours_BSM.any(-1))


def verified(tree: TokenTree, accepted: Accepted, output: PassOutput) -> Verified:
    """The target's logits at every node, and the node's place on the accepted path."""
    width = accepted.path_BK.shape[1]
    columns_K = torch.arange(width, device=tree.tokens_BN.device)
    places_BK = torch.where(columns_K < accepted.counts_B[:, None], columns_K, -1)
    # Padding columns of a path hold their own index, which may be a node that is on it: the larger place is right.
    places_BN = torch.full_like(tree.tokens_BN, -1).scatter_reduce(1, accepted.path_BK, places_BK, "amax")
    return Verified(tokens_BM=tree.tokens_BN, real_BM=tree.real_BN, logits_BMV=output.logits_BMV, places_BM=places_BN)
