"""Tree shapes: ancestors, order, refusals."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules import TokenTree, Topology
from support.answers import unplaced
from support.policies import paths


def test_ancestors_and_depths_of_a_written_out_tree() -> None:
    #      0
    #     / \
    #    1   2
    #   / \   \
    #  3   4   5
    topology = Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 2, 0))
    assert topology.depths == (0, 1, 1, 2, 2, 2)
    assert topology.depth == 2
    assert topology.width == 3
    assert paths(topology) == ((), (0,), (1,), (0, 0), (0, 2), (1, 0))
    assert topology.ancestors_NN.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert Topology.from_paths(paths(topology)) == topology
    assert paths(topology.prefix(3)) == ((), (0,), (1,))


def test_a_tree_from_parents_equals_the_planted_topology() -> None:
    topology = Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 2, 0))
    tokens = torch.arange(12).view(2, 6)
    planted = topology.plant(tokens)
    derived = TokenTree.from_parents(tokens, torch.tensor(topology.parents).expand(2, -1))
    for name in ("tokens_BN", "parents_BN", "depths_BN", "ancestors_BNN", "real_BN"):
        assert torch.equal(getattr(planted, name), getattr(derived, name)), name
    assert planted.max_depth == derived.max_depth


def test_padding_nodes_see_only_themselves() -> None:
    tree = TokenTree.prompts(torch.tensor([[4, 5, 6], [7, 0, 0]]), torch.tensor([3, 1]))
    assert tree.ancestors_BNN[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert tree.ancestors_BNN[1, 2, 1].item() is False
    assert bool(tree.ancestors_BNN[1, 2, 2])


@pytest.mark.parametrize(("parents", "ranks", "message"), [
    ((-1, 1), (0, 0), "parent of node 1 must be a node before it"),
    ((0,), (0,), "root and its parent must be -1"),
    ((-1, 0, 0), (0, 1, 1), "same parent and the same rank"),
    ((-1, 0), (0,), "as many parents as ranks"),
    ((-1, 0), (0, -2), "ranks must be at least 0"),
])
def test_wrong_topologies_are_refused(parents: tuple[int, ...], ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(parents, ranks)


def test_trees_prefixes_and_paths_refuse_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match="row 1: a node's parent must come before"):
        TokenTree.from_parents(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[-1, 0, 1], [-1, 2, 0]]))
    with pytest.raises(ValueError, match="size must be between 1 and 3"):
        Topology.chain(2).prefix(4)
    with pytest.raises(ValueError, match="comes before its parent"):
        Topology.from_paths([(0, 1)])


def test_packing_moves_real_nodes_to_the_front_of_each_row_and_cuts() -> None:
    #      0            Row 0 lacks node 2 and what is below it, row 1 lacks nothing but its last node.
    #     / \
    #    1   2
    #   / \   \
    #  3   4   5
    topology = Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 2, 0))
    real_BN = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0]]) > 0
    tree = replace(topology.plant(torch.arange(12).view(2, 6)), real_BN=real_BN)
    packed = tree.packed(5)
    assert packed.tokens_BN.tolist() == [[0, 1, 3, 4, 2], [6, 7, 8, 9, 10]]
    assert packed.parents_BN.tolist() == [[-1, 0, 1, 1, 0], [-1, 0, 0, 1, 1]]
    assert packed.real_BN.tolist() == [[True] * 4 + [False], [True] * 5]
    derived = TokenTree.from_parents(packed.tokens_BN, packed.parents_BN, packed.real_BN)
    # Padding derived from parents sees only itself, packed padding also what it stood below.
    assert torch.equal(packed.ancestors_BNN[packed.real_BN], derived.ancestors_BNN[packed.real_BN])
    assert packed.depths_BN[packed.real_BN].tolist() == derived.depths_BN[packed.real_BN].tolist()
    assert tree.packed(2).tokens_BN.tolist() == [[0, 1], [6, 7]]
    assert tree.packed(2).max_depth == 1


def test_a_tree_with_virtual_nodes_is_not_packed() -> None:
    tree = replace(Topology.chain(2).plant(torch.zeros(1, 3, dtype=torch.long)), virtual=unplaced(torch.zeros(1, 1, 4)))
    with pytest.raises(ValueError, match="virtual nodes cannot be packed"):
        tree.packed(2)
