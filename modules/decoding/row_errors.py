"""Per-row error detection on the device: a row that goes wrong ends, the others finish.

Codes travel with the accepted tokens in the one transfer of a pass; words are made on the host.

Shapes: B rows, N nodes, M nodes with logits, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from ..token_tree import TokenTree
from ..verification.tree_walk import Accepted
from .requests import DecodeResult, Generation

SOUND, LOGITS, TOKEN, PARENT, DRAFT = range(5)
_MESSAGES = {
    LOGITS: "the target's logits are NaN or infinite after token {place} of the answer; run the target in a wider "
    "number type, or check its weights",
    TOKEN: "the drafter proposed a token outside the target's vocabulary (ids 0 to {last}) after token {place} of the "
    "answer; check the ids of its draft vocabulary",
    PARENT: "the draft tree after token {place} of the answer has a node whose parent does not come before it; a "
    "policy must list parents first",
    DRAFT: "the drafter's probabilities are NaN or infinite after token {place} of the answer; check its weights",
}


class DecodeError(UserError):
    """Some rows of a batch failed; all the others were finished and are in `result`."""

    def __init__(self, result: DecodeResult) -> None:
        failed = [generation for generation in result.generations if generation.finish == "error"]
        others = len(result.generations) - len(failed)
        text = "; ".join(generation.error for generation in failed)
        super().__init__(text if not others else f"{text} ({others} other answers are in this error's result)")
        self.result = result  # Every generation; failed ones have `finish` "error", their tokens so far and `error`


def message(code: int, generation: Generation, vocab_size: int) -> str:
    """The sentence for a fault of one row, which names its request."""
    text = _MESSAGES[code].format(place=len(generation.tokens), last=vocab_size - 1)
    return f"prompt {generation.request.index}: {text}"


def screen(tree: TokenTree, vocab_size: int) -> tuple[TokenTree, Tensor]:
    """(the tree, with nothing but a root in faulty rows; the fault of each row, [B], int64)."""
    # Padding counts too: ids that the target does not know cannot be embedded.
    outside_BN = (tree.tokens_BN < 0) | (tree.tokens_BN >= vocab_size)
    faults_B = examine(tree, outside_BN)
    # On the CPU it is known at once that nothing is wrong; reading the answer from an accelerator would wait for it.
    sound = faults_B.device.type == "cpu" and not bool(outside_BN.any() | faults_B.any())
    return (tree if sound else pruned(tree, faults_B, outside_BN)), faults_B


def examine(tree: TokenTree, outside_BN: Tensor) -> Tensor:
    """The fault of each row's tree, [B], int64, with marks at nodes whose token the target does not know."""
    columns_N = torch.arange(tree.size, device=tree.tokens_BN.device)
    late_BN = ((tree.parents_BN >= columns_N) | (tree.parents_BN < 0)) & (columns_N > 0)
    # Of several faults of a row the last one here is reported.
    faults_B = torch.where((outside_BN & tree.real_BN).any(-1), TOKEN, SOUND)
    faults_B = torch.where((late_BN & tree.real_BN).any(-1), PARENT, faults_B)
    if tree.drawn is not None:
        largest_B = tree.drawn.log_q_BIQ.amax((1, 2))
        faults_B = torch.where(largest_B.isnan() | (largest_B == torch.inf), DRAFT, faults_B)
    return faults_B


def pruned(tree: TokenTree, faults_B: Tensor, outside_BN: Tensor) -> TokenTree:
    """The tree with nothing but a root in faulty rows, and with ids that the target knows everywhere."""
    columns_N = torch.arange(tree.size, device=faults_B.device)
    faulty_B1 = (faults_B > 0)[:, None]
    itself_NN = columns_N[:, None] == columns_N
    return replace(tree, tokens_BN=tree.tokens_BN.masked_fill(outside_BN, 0),
                   parents_BN=torch.where(faulty_B1, columns_N - 1, tree.parents_BN),
                   depths_BN=torch.where(faulty_B1, 0, tree.depths_BN),
                   ancestors_BNN=torch.where(faulty_B1[..., None], itself_NN, tree.ancestors_BNN),
                   real_BN=tree.real_BN & (~faulty_B1 | (columns_N == 0)))


def unreadable(logits_BMV: Tensor) -> Tensor:
    """True at nodes whose logits hold NaN or +inf, or nothing but -inf, [B, M]; some models forbid tokens by a single
    -inf."""
    return ~logits_BMV.amax(-1).isfinite()


def cut(accepted: Accepted, unreadable_BN: Tensor) -> tuple[Accepted, Tensor]:
    """(the accepted paths up to the first node whose logits say nothing, rows that have one, [B]): after it the bonus
    token means nothing. Nodes that are not accepted have no part in what is emitted."""
    places_K = torch.arange(accepted.path_BK.shape[1], device=unreadable_BN.device)
    lost_BK = unreadable_BN.gather(1, accepted.path_BK) & (places_K < accepted.counts_B[:, None])
    lost_B = lost_BK.any(-1)
    counts_B = torch.where(lost_B, lost_BK.long().argmax(-1) + 1, accepted.counts_B)
    return replace(accepted, counts_B=counts_B), lost_B
