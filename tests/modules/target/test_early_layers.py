"""The first layers of a target: run while a tree grows, taken over by the verifying pass, on every architecture."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.parts.campaign_drafters import ARCHITECTURES, target_of
from draftsmith.modules import PassOutput, Target, TargetRows, TokenTree
from draftsmith.modules.target.partial_passes import EarlyLayers
from support.answers import unplaced
from support.policies import commit_path
from torch import Tensor

pytestmark = pytest.mark.usefixtures("on_device")

TEXTS = ([5, 9, 33, 71, 8, 20, 11], [40, 41, 60], [7, 90, 12, 13, 55])
"""Prompts of different lengths, so that the rows of a batch are ragged."""
GROWN = (-1, 0, 0, 1, 1, 2, 3, 3)  # Parents of the nodes that are drafted: four levels
LEVELS = ((0,), (1, 2), (3, 4, 5), (6, 7))


@contextmanager
def attention_inputs(target: Target) -> Iterator[Counter[int]]:
    """Tokens that the attention of each layer reads: those of all calls, rows and padding included."""
    seen: Counter[int] = Counter()

    def counting(layer: int) -> Any:
        def hook(_module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            seen[layer] += (args[0] if args else kwargs["hidden_states"]).shape[:2].numel()
        return hook

    attentions = [next(part for name, part in layer.named_children() if "att" in name and "norm" not in name)
                  for layer in target.layers]
    handles = [part.register_forward_pre_hook(counting(layer), with_kwargs=True)
               for layer, part in enumerate(attentions)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def prompted(target: Target, taps: tuple[int, ...] = ()) -> TargetRows:
    """Rows that have read the prompts."""
    rows, width = target.start(len(TEXTS), 48, taps), max(map(len, TEXTS))
    counts = torch.tensor([len(text) for text in TEXTS])
    padded = torch.tensor([text + [0] * (width - len(text)) for text in TEXTS])
    rows.run(TokenTree.prompts(padded, counts), list(range(len(TEXTS))))
    rows.commit(torch.arange(width).expand(len(TEXTS), -1), counts, counts.tolist(), moved=False)
    return rows


def draft(early: EarlyLayers, tokens_BM: Tensor) -> Tensor:
    """Run the layers on the grown tree, level by level, with numbers for the nodes that are not their places."""
    states = []
    for level in LEVELS:
        parents = [-1 if GROWN[node] < 0 else 10 * GROWN[node] + 3 for node in level]
        shape = (len(tokens_BM), len(level))
        states.append(early.run(torch.tensor([10 * node + 3 for node in level]).expand(shape),
                                torch.tensor(parents).expand(shape), tokens_BM[:, level]))
    return torch.cat(states, dim=1)


def verified_tree(tokens_BM: Tensor, chance: random.Random, size: int = 8) -> TokenTree:
    """Trees of drafted nodes in another order, without some of them, and of others that were never drafted."""
    tokens, parents, real = [], [], []
    for row in tokens_BM.tolist():
        drafted: list[int | None] = [0]
        row_tokens, row_parents = [row[0]], [-1]
        while len(drafted) < size - 1:
            open_nodes = [node for node in range(1, len(GROWN)) if node not in drafted and GROWN[node] in drafted]
            if open_nodes and chance.random() < 0.6:
                node = chance.choice(open_nodes)
                row_parents.append(drafted.index(GROWN[node]))
                row_tokens.append(row[node])
                drafted.append(node)
            else:
                row_parents.append(chance.randrange(len(drafted)))
                row_tokens.append(chance.randrange(3, 100))
                drafted.append(None)
        tokens.append([*row_tokens, 0])
        parents.append([*row_parents, 0])
        real.append([True] * (size - 1) + [False])
    return TokenTree.from_parents(torch.tensor(tokens), torch.tensor(parents), torch.tensor(real))


def equal_at(found: PassOutput, expected: PassOutput, nodes_BN: Tensor) -> None:
    """Compare logits, final states and taps at some nodes."""
    pairs = [(found.logits_BMV, expected.logits_BMV), (found.final_BND, expected.final_BND)]
    pairs += [(found.taps[layer], states) for layer, states in expected.taps.items()]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours[nodes_BN], theirs[nodes_BN], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_pass_after_drafting_equals_a_pass_without(name: str, num_layers: int) -> None:
    """Ragged rows, several rounds, trees in another order than they grew in, with nodes that were never drafted."""
    target, chance = target_of(name), random.Random(3)
    generator = torch.Generator().manual_seed(num_layers)
    rows, plain = prompted(target, (num_layers - 1, 2)), prompted(target, (num_layers - 1, 2))
    early = rows.early(num_layers)
    for _ in range(3):
        tokens_BM = torch.randint(3, 100, (len(TEXTS), len(GROWN)), generator=generator)
        states_BMD = draft(early, tokens_BM)
        grown = TokenTree.from_parents(tokens_BM, torch.tensor(GROWN).expand_as(tokens_BM))
        torch.testing.assert_close(states_BMD, plain.run(grown).taps[num_layers - 1], atol=1e-9, rtol=0)
        tree = verified_tree(tokens_BM, chance)
        equal_at(rows.run(tree), plain.run(tree), tree.real_BN)
        # Each row keeps a path of its own: the rows stay ragged, and the next round reads their keys.
        for one in (rows, plain):
            commit_path(one, tree, [2, 3, 4])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_layer_reads_a_node_twice(name: str) -> None:
    """A chain of five tokens of which four were drafted from: the first layers read the fifth in the verifying pass."""
    target = target_of(name)
    rows = target.start(2, 48)
    prompt, counts = torch.tensor([[5, 9, 33], [40, 41, 60]]), torch.tensor([3, 3])
    rows.run(TokenTree.prompts(prompt, counts), [0, 1])
    rows.commit(torch.arange(3).expand(2, -1), counts, [3, 3], moved=False)
    early, tokens_BN = rows.early(2), torch.randint(3, 100, (2, 5))
    with attention_inputs(target) as seen:
        for node in range(4):
            here = torch.full((2, 1), node)
            early.run(here, here - 1, tokens_BN[:, node : node + 1])
        assert seen == {0: 8, 1: 8}
        rows.run(TokenTree.prompts(tokens_BN, torch.tensor([5, 5])))
    assert seen == {0: 10, 1: 10, 2: 10}


def test_virtual_nodes_are_read_by_the_first_layers_in_the_pass() -> None:
    target = target_of("Gemma3")
    rows, plain = prompted(target), prompted(target)
    tokens_BM = torch.randint(3, 100, (3, len(GROWN)), generator=torch.Generator().manual_seed(4))
    draft(rows.early(2), tokens_BM)
    tree = TokenTree.from_parents(tokens_BM, torch.tensor(GROWN).expand_as(tokens_BM))
    real_BN = torch.arange(len(GROWN)).expand_as(tokens_BM) < len(GROWN) - 2
    virtual = replace(tree, real_BN=real_BN, virtual=unplaced(torch.randn(3, 2, 32, dtype=torch.float64)))
    equal_at(rows.run(virtual), plain.run(virtual), torch.ones_like(real_BN))


@pytest.mark.parametrize("drafted", [True, False])
def test_virtual_nodes_without_finite_states_do_not_reach_other_nodes(drafted: bool) -> None:
    """Of a tree whose other nodes the first layers have read, or of which they read some in the pass."""
    target = target_of("Gemma3")
    rows, plain = prompted(target), prompted(target)
    tokens_BM = torch.randint(3, 100, (3, len(GROWN)), generator=torch.Generator().manual_seed(4))
    draft(rows.early(2), tokens_BM if drafted else tokens_BM.roll(1, 1))
    tree = TokenTree.from_parents(tokens_BM, torch.tensor(GROWN).expand_as(tokens_BM))
    real_BN = torch.arange(len(GROWN)).expand_as(tokens_BM) < len(GROWN) - 2
    virtual = replace(tree, real_BN=real_BN, virtual=unplaced(torch.full((3, 2, 32), torch.nan, dtype=torch.float64)))
    equal_at(rows.run(virtual), plain.run(tree), real_BN)


def test_a_tree_of_the_root_alone_may_follow_a_draft() -> None:
    """The other rows' roots are verified where a policy failed; the next draft starts anew."""
    target = target_of("Llama")
    rows, plain = prompted(target), prompted(target)
    early = rows.early(1)
    for _ in range(2):
        tokens_BM = torch.randint(3, 100, (3, len(GROWN)), generator=torch.Generator().manual_seed(4))
        draft(early, tokens_BM)
        root = TokenTree.prompts(tokens_BM[:, :1], torch.ones(3, dtype=torch.long))
        equal_at(rows.run(root), plain.run(root), root.real_BN)
        for one in (rows, plain):
            one.commit(torch.zeros(3, 1, dtype=torch.long), torch.ones(3, dtype=torch.long), [1, 1, 1], moved=False)


def test_layers_alone_give_the_states_of_the_target() -> None:
    """In a cache of their own they read the text themselves; rows leave and join."""
    target = target_of("Gemma3")
    early, plain = EarlyLayers.alone(target, 3, 48, 2), prompted(target, (1,))
    for rows in ([0, 1, 2], [2], [0, 1]):
        early.cache.clear(torch.tensor(rows))
        counts = [len(TEXTS[row]) for row in rows]
        padded = torch.tensor([TEXTS[row] + [0] * (max(counts) - len(TEXTS[row])) for row in rows])
        early.read(rows, padded, torch.tensor(counts), counts)
    tokens_BM = torch.randint(3, 100, (3, len(GROWN)), generator=torch.Generator().manual_seed(4))
    tree = TokenTree.from_parents(tokens_BM, torch.tensor(GROWN).expand_as(tokens_BM))
    expected = plain.run(tree).taps[1]
    torch.testing.assert_close(draft(early, tokens_BM), expected, atol=1e-9, rtol=0)
    early.drop()
    early.cache.keep(torch.tensor([2, 1]))
    torch.testing.assert_close(draft(early, tokens_BM[[2, 1]]), expected[[2, 1]], atol=1e-9, rtol=0)


def test_a_broken_token_that_was_drafted_does_not_reach_other_nodes() -> None:
    original = target_of("Llama")
    model = original.copy_model()
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
    embedding.weight[70] = torch.nan
    target = Target(model, original.tokenizer, name="Llama")
    rows, plain = target.start(1, 48), original.start(1, 48)
    tree = TokenTree.from_parents(torch.tensor([[5, 70, 9, 8]]), torch.tensor([[-1, 0, 0, 2]]))
    early = rows.early(1)
    early.run(torch.tensor([[0]]), torch.tensor([[-1]]), tree.tokens_BN[:, :1])
    early.run(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), tree.tokens_BN[:, 1:3])
    found = rows.run(tree)
    sound = torch.tensor([[True, False, True, True]])
    equal_at(found, plain.run(tree), sound)
    assert bool(found.logits_BMV[~sound].isnan().all())


def test_a_tap_below_the_first_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of the first 2 layers only the last one's output is kept, got the taps \(0"):
        prompted(target_of("Llama"), (0, 2)).early(2)


def test_nothing_drafted_is_nothing_to_hand_over() -> None:
    target = target_of("Llama")
    rows = prompted(target)
    with pytest.raises(ValueError, match="no node was read by the first layers"):
        rows.early(1).hand_over(TokenTree.prompts(torch.tensor([[5]]), torch.tensor([1])), torch.zeros(1, 1, 32))
