"""Drafting by what was seen: n-grams of the longest context, copies of the latest match, the matrix of next tokens."""

import random

import pytest
import torch
from draftsmith.modules import Chain, StaticTree, TokenRecycling, Topology, Verified
from draftsmith.modules.baselines.memories import Ngrams, PromptLookup, recycling_tree
from draftsmith.modules.interfaces.proposer import DraftState
from support.answers import ROOT, frontier, logits_of, observation, observe
from support.policies import paths

CPU = torch.device("cpu")
V = 12


def teach(drafter: Ngrams, state: DraftState, row: int, text: list[int], successors: list[list[int]],
          places: list[int] | None = None) -> None:
    """Show a text (its last token the root) with the most probable next tokens of each token."""
    places = list(range(len(text) - 1)) if places is None else places
    verified = Verified(tokens_BM=torch.tensor([[text[max(place, 0)] for place in places]]),
                        real_BM=torch.ones(1, len(places), dtype=torch.bool), logits_BMV=logits_of(successors, V),
                        places_BM=torch.tensor([places]))
    drafter.observe(state, torch.tensor([row]), observation([text], verified))


def guesses(drafter: Ngrams, state: DraftState) -> dict[int, float]:
    scores = drafter.expand(state, ROOT)
    assert scores.candidates_BFHQ is not None
    pairs = zip(scores.candidates_BFHQ[0, 0, 0].tolist(), scores.log_probs_BFHQ[0, 0, 0].exp().tolist(), strict=True)
    found = [(token, round(chance, 4)) for token, chance in pairs if chance > 0]
    assert len(dict(found)) == len(found), "a token is proposed twice"
    return dict(found)


def test_the_longest_context_is_used_and_its_probabilities_are_the_targets() -> None:
    drafter = Ngrams(V, CPU, longest=2, candidates=2)
    state = drafter.start(1, 32)
    teach(drafter, state, 0, [1, 2, 3, 2, 9, 1, 2], [[2, 5], [3, 5], [2, 5], [9, 5], [1, 5], [2, 5]])
    # The token before the root 2 is 1: only the first 2 has that context, the second came after 3.
    probs = logits_of([[3, 5]], V)[0, 0].softmax(-1)
    assert guesses(drafter, state) == {3: round(float(probs[3]), 4), 5: round(float(probs[5]), 4)}


def test_equal_contexts_are_averaged_and_duplicates_merged() -> None:
    drafter = Ngrams(V, CPU, longest=1, candidates=1, averaged=3)
    state = drafter.start(1, 32)
    teach(drafter, state, 0, [2, 7, 2, 8, 2, 7, 2], [[7], [2], [8], [2], [7], [2]])
    chance = float(logits_of([[7]], V)[0, 0].softmax(-1)[7])
    assert guesses(drafter, state) == {7: round(chance * 2 / 3, 4), 8: round(chance / 3, 4)}


def test_only_the_latest_entries_are_averaged_and_the_oldest_are_overwritten() -> None:
    drafter = Ngrams(V, CPU, longest=1, candidates=1, averaged=1, memory=3)
    state = drafter.start(1, 32)
    teach(drafter, state, 0, [2, 7, 2, 8, 3, 4, 2], [[7], [2], [8], [3], [4], [2]])
    assert guesses(drafter, state) == {}
    teach(drafter, state, 0, [2, 5, 2], [[5], [2]])
    assert list(guesses(drafter, state)) == [5]
    teach(drafter, state, 0, [2, 6, 2], [[6], [2]])
    assert list(guesses(drafter, state)) == [6]


def test_rejected_nodes_are_not_stored_and_rows_share_the_memory() -> None:
    drafter = Ngrams(V, CPU, longest=2, candidates=1)
    state = drafter.start(2, 32)
    teach(drafter, state, 0, [1, 2, 3], [[9], [2], [3]], places=[-1, 0, 1])
    teach(drafter, state, 1, [1, 2], [[2]])
    best, known = drafter.expand(state, frontier([0], [-1], [[3], [2]])).best(1)
    assert known is not None
    assert known.flatten().tolist() == [False, True]
    assert best.flatten().tolist()[1] == 3


def test_nodes_of_a_tree_have_the_contexts_of_their_own_paths() -> None:
    drafter = Ngrams(V, CPU, longest=3, candidates=2, averaged=1)
    state = drafter.start(1, 64)
    teach(drafter, state, 0, [1, 2, 3, 4, 9, 9, 1, 2], [[2, 11], [3, 9], [4, 10], [9, 10], [9, 10], [1, 10], [2, 11]])
    tree = StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])).grow(
        drafter, state, torch.tensor([2]))
    assert tree.tokens_BN[0].tolist() == [2, 3, 9, 4, 1, 9]
    assert bool(tree.real_BN.all())


def test_cleared_rows_lose_their_text_and_the_memory_stays() -> None:
    drafter = Ngrams(V, CPU, longest=3, candidates=1)
    state = drafter.start(2, 32)
    teach(drafter, state, 1, [1, 2, 3, 2], [[2], [3], [2]])
    state.keep(torch.tensor([1]))
    assert list(guesses(drafter, state)) == [3]
    state.clear(torch.tensor([0]))
    assert guesses(drafter, state) == {}
    teach(drafter, state, 0, [7, 1], [[1]])
    assert list(guesses(drafter, state)) == [2]
    drafter.forget()
    assert guesses(drafter, state) == {}


def copied(text: list[int], *, shortest: int = 1, longest: int = 3, count: int = 4) -> list[int]:
    """Tokens that prompt lookup drafts after a text; empty where it has no guess."""
    drafter = PromptLookup(CPU, shortest=shortest, longest=longest, copied=count)
    state = drafter.start(1, 64)
    observe(drafter, state, [0], [text])
    tree = Chain(count).grow(drafter, state, torch.tensor([text[-1]]))
    assert bool(tree.real_BN.all())
    return tree.tokens_BN[0, 1:].tolist()


def plain_copy(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The slow plain reference."""
    for length in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                grown = list(text)
                for place in range(count):
                    grown.append(grown[end + place])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize(("text", "sizes", "expected"), [
    pytest.param([1, 2, 3, 10, 11, 12, 13, 9, 3, 20, 1, 2, 3], {}, [10, 11, 12, 13], id="longest before later"),
    pytest.param([7, 8, 1, 1, 1, 7, 8, 2, 3, 4, 5, 7, 8], {}, [2, 3, 4, 5], id="latest of equal ones"),
    # A copy that reaches the end of the text continues with its own tokens.
    ([5, 6, 9, 5], {}, [6, 9, 5, 6]), ([5, 5], {}, [5, 5, 5, 5]),
    *((text, {}, []) for text in ([5], [5, 6], [5, 6, 7, 8], [0, 1])),
    # A suffix below the shortest is not copied.
    ([1, 2, 3, 4, 9, 2, 3, 4], {"shortest": 3, "longest": 16}, [9, 2, 3, 4]),
    ([1, 2, 3, 4, 9, 2, 3, 4], {"shortest": 4, "longest": 16}, []),
])
def test_what_is_copied(text: list[int], sizes: dict[str, int], expected: list[int]) -> None:
    assert copied(text, **sizes) == expected


def test_equals_the_plain_reference_on_random_texts() -> None:
    rng = random.Random(0)
    for _ in range(150):
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        longest = rng.randrange(1, 6)
        shortest = rng.randrange(1, longest + 1)
        assert copied(text, shortest=shortest, longest=longest, count=5) == plain_copy(text, shortest, longest, 5), text


def test_rows_of_different_lengths_are_added_cleared_and_moved() -> None:
    drafter = PromptLookup(CPU, copied=3)
    state = drafter.start(3, 32)
    observe(drafter, state, [0, 1, 2], [[1, 2, 3, 1], [4, 5, 6, 7], [8, 9, 8]])
    tree = Chain(3).grow(drafter, state, torch.tensor([1, 7, 8]))
    assert tree.tokens_BN[[0, 2], 1:].tolist() == [[2, 3, 1], [9, 8, 9]]
    assert tree.real_BN.tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
    # The former root comes back as the first of the new tokens; one row got more than another.
    observe(drafter, state, [0, 1, 2], [[1, 2], [7, 4, 5, 6, 7], [8, 3]])
    tree = Chain(3).grow(drafter, state, torch.tensor([2, 7, 3]))
    assert tree.tokens_BN[:2, 1:].tolist() == [[3, 1, 2], [4, 5, 6]]
    assert tree.real_BN[2].tolist() == [True, False, False, False]
    state.clear(torch.tensor([1]))
    observe(drafter, state, [1], [[4, 9, 4]])
    assert Chain(3).grow(drafter, state, torch.tensor([2, 4, 3])).tokens_BN[1, 1:].tolist() == [9, 4, 9]
    state.keep(torch.tensor([0, 2]))
    observe(drafter, state, [0, 1], [[2, 3], [3, 8]])
    assert Chain(3).grow(drafter, state, torch.tensor([3, 8])).tokens_BN[:, 1:].tolist() == [[1, 2, 3], [3, 8, 3]]


def test_a_token_0_in_the_padding_is_not_part_of_the_text() -> None:
    drafter = PromptLookup(CPU, copied=2)
    state = drafter.start(2, 32)
    observe(drafter, state, [0, 1], [[3, 4, 5, 6, 7, 0], [2, 0]])
    assert Chain(2).grow(drafter, state, torch.tensor([0, 0])).size == 1


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


def test_wrong_calls_are_refused() -> None:
    copier, drafter = PromptLookup(CPU), TokenRecycling(12, CPU)
    with pytest.raises(ValueError, match="must have 1 node, got 2"):
        copier.expand(copier.start(1, 8), frontier([0, 1], [-1, 0], [[4, 4]]))
    with pytest.raises(ValueError, match="recycling learns from logits"):
        drafter.observe(drafter.start(1, 8), torch.tensor([0]), observation([[1, 2]]))
