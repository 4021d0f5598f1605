"""N-grams with stored distributions: the longest context, averaged over its latest occurrences, in any row."""

import pytest
import torch
from draftsmith.modules import NgramConfig, Ngrams, StaticTree, Topology, UserError, Verified
from draftsmith.modules.interfaces.proposer import DraftState
from support.observations import ROOT, frontier, logits_of, observation

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
    drafter = Ngrams(NgramConfig(longest=2, candidates=2), V, CPU)
    state = drafter.start(1, 32)
    teach(drafter, state, 0, [1, 2, 3, 2, 9, 1, 2], [[2, 5], [3, 5], [2, 5], [9, 5], [1, 5], [2, 5]])
    # The token before the root 2 is 1: only the first 2 has that context, the second came after 3.
    probs = logits_of([[3, 5]], V)[0, 0].softmax(-1)
    assert guesses(drafter, state) == {3: round(float(probs[3]), 4), 5: round(float(probs[5]), 4)}


def test_equal_contexts_are_averaged_and_duplicates_merged() -> None:
    drafter = Ngrams(NgramConfig(longest=1, candidates=1, averaged=3), V, CPU)
    state = drafter.start(1, 32)
    teach(drafter, state, 0, [2, 7, 2, 8, 2, 7, 2], [[7], [2], [8], [2], [7], [2]])
    chance = float(logits_of([[7]], V)[0, 0].softmax(-1)[7])
    assert guesses(drafter, state) == {7: round(chance * 2 / 3, 4), 8: round(chance / 3, 4)}


def test_only_the_latest_entries_are_averaged_and_the_oldest_are_overwritten() -> None:
    drafter = Ngrams(NgramConfig(longest=1, candidates=1, averaged=1, memory=3), V, CPU)
    state = drafter.start(1, 32)
    teach(drafter, state, 0, [2, 7, 2, 8, 3, 4, 2], [[7], [2], [8], [3], [4], [2]])
    assert guesses(drafter, state) == {}
    teach(drafter, state, 0, [2, 5, 2], [[5], [2]])
    assert list(guesses(drafter, state)) == [5]
    teach(drafter, state, 0, [2, 6, 2], [[6], [2]])
    assert list(guesses(drafter, state)) == [6]


def test_rejected_nodes_are_not_stored_and_rows_share_the_memory() -> None:
    drafter = Ngrams(NgramConfig(longest=2, candidates=1), V, CPU)
    state = drafter.start(2, 32)
    teach(drafter, state, 0, [1, 2, 3], [[9], [2], [3]], places=[-1, 0, 1])
    teach(drafter, state, 1, [1, 2], [[2]])
    best, known = drafter.expand(state, frontier([0], [-1], [[3], [2]])).best(1)
    assert known is not None
    assert known.flatten().tolist() == [False, True]
    assert best.flatten().tolist()[1] == 3


def test_nodes_of_a_tree_have_the_contexts_of_their_own_paths() -> None:
    drafter = Ngrams(NgramConfig(longest=3, candidates=2, averaged=1), V, CPU)
    state = drafter.start(1, 64)
    teach(drafter, state, 0, [1, 2, 3, 4, 9, 9, 1, 2], [[2, 11], [3, 9], [4, 10], [9, 10], [9, 10], [1, 10], [2, 11]])
    tree = StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])).grow(
        drafter, state, torch.tensor([2]))
    assert tree.tokens_BN[0].tolist() == [2, 3, 9, 4, 1, 9]
    assert bool(tree.real_BN.all())


def test_cleared_rows_lose_their_text_and_the_memory_stays() -> None:
    drafter = Ngrams(NgramConfig(longest=3, candidates=1), V, CPU)
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


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UserError, match="memory must be at least 1, got 0"):
        NgramConfig(memory=0)
    with pytest.raises(UserError, match=r"averaged must be at most memory \(2\), got 3"):
        NgramConfig(memory=2, averaged=3)
