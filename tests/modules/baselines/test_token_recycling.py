"""The matrix of next tokens: each verified node writes its line, and the tree is filled from it."""

import pytest
import torch
from draftsmith.modules import StaticTree, TokenRecycling, Topology, UserError, Verified
from draftsmith.modules.baselines.memories import recycling_tree
from support.observations import frontier, logits_of, observation
from support.tree_shapes import paths

CPU = torch.device("cpu")


def seen(tokens: list[int], successors: list[list[int]], real: list[bool] | None = None) -> Verified:
    count = len(tokens)
    return Verified(tokens_BM=torch.tensor([tokens]), real_BM=torch.tensor([real or [True] * count]),
                    logits_BMV=logits_of(successors, 12), places_BM=torch.tensor([[0] + [-1] * (count - 1)]))


def taught(*passes: Verified, candidates: int = 3) -> TokenRecycling:
    drafter = TokenRecycling(12, CPU, candidates)
    for verified in passes:
        drafter.observe(drafter.start(1, 8), torch.tensor([0]), observation([[1, 2]], verified))
    return drafter


def test_every_verified_node_writes_its_line_and_the_later_of_two_is_kept() -> None:
    drafter = taught(seen([4, 5, 4], [[1, 2, 3], [6, 7, 8], [9, 8, 7]]))
    assert drafter.successors_VC[4].tolist() == [9, 8, 7]
    assert drafter.successors_VC[5].tolist() == [6, 7, 8]
    assert drafter.successors_VC[6].tolist() == [-1, -1, -1]


def test_a_later_pass_rewrites_and_padding_is_not_stored() -> None:
    drafter = taught(seen([4, 5], [[1, 2, 3], [6, 7, 8]]),
                     seen([4, 5, 4], [[3, 2, 1], [1, 2, 3], [9, 9, 9]], [True, False, False]))
    assert drafter.successors_VC[4].tolist() == [3, 2, 1]
    assert drafter.successors_VC[5].tolist() == [6, 7, 8]


def test_the_tree_is_filled_from_the_matrix_and_ends_where_a_token_is_new() -> None:
    drafter = taught(seen([4, 1], [[1, 2, 3], [4, 5, 6]]))
    tree = StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 1)])).grow(
        drafter, drafter.start(2, 8), torch.tensor([4, 9]))
    # Nothing is stored for token 2, nor for the second row's root.
    assert tree.tokens_BN[0].tolist() == [4, 1, 2, 4, 5, 2]
    assert tree.real_BN.tolist() == [[True] * 6, [True] + [False] * 5]
    assert tree.parents_BN[0].tolist() == [-1, 0, 0, 1, 1, 3]
    drafter.forget()
    assert StaticTree(Topology.chain(2)).grow(drafter, drafter.start(2, 8), torch.tensor([4, 9])).size == 1


def test_proposals_are_ordered_by_rank() -> None:
    drafter = taught(seen([4], [[7, 2, 9]]))
    scores = drafter.expand(drafter.start(1, 8), frontier([0, 1], [-1, 0], [[4, 5]]))
    best, known = scores.best(4)
    assert best[0, 0, 0].tolist() == [7, 2, 9, 0]
    assert known is not None
    assert known[0, :, 0].tolist() == [[True, True, True, False], [False] * 4]


def test_the_tree_is_best_first() -> None:
    tree = recycling_tree(81)
    assert tree.size == 81
    assert tree.depth <= 6
    assert paths(tree.prefix(4)) == ((), (0,), (0, 0), (1,))
    assert recycling_tree(20) == tree.prefix(20)
    with pytest.raises(ValueError, match="got size 0"):
        recycling_tree(0)


def test_wrong_settings_and_calls_are_refused() -> None:
    with pytest.raises(UserError, match="candidates must be between 1 and 8, got 9"):
        TokenRecycling(12, CPU, 9)
    drafter = TokenRecycling(12, CPU)
    with pytest.raises(ValueError, match="recycling learns from logits"):
        drafter.observe(drafter.start(1, 8), torch.tensor([0]), observation([[1, 2]]))
