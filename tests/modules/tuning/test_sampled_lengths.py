"""Expected lengths of trees along drawn text: what replays count exactly, and what decoding other answers measures."""

import math
from dataclasses import replace

import pytest
import torch
from draftsmith.export.tuning import Prediction
from draftsmith.modules import (
    Drafter,
    DraftLM,
    DraftLMConfig,
    DrawnText,
    Features,
    ProposedText,
    Request,
    StaticTree,
    Target,
    Topology,
    decode,
    drawn_text,
    expected_lengths,
    predicted_lengths,
    proposed_text,
    rank_table,
    replay,
    search_tree,
    sure_text,
)
from draftsmith.modules.decoding.requests import DecodeSettings
from draftsmith.modules.tuning.sampled_lengths import relative_errors
from support.encoded_answers import encoded_answers
from support.families import CASES, randomised
from support.passages import LENGTH, passages, trained_drafter, trained_target

WIDE = Topology((-1, 0, 0, 1, 1, 2, 0, 3, 4), (0, 0, 1, 0, 1, 0, 2, 0, 0))
PROMPT = 8


def made(family: str, target: Target) -> Drafter:
    """A drafter that guesses differently at each place, and is right at some of them."""
    if family == "draft-lm":
        # The target's first layer: a random draft model would hardly ever be right.
        return DraftLM.create(DraftLMConfig(layers=(0,)), target).eval().to(target.dtype)
    return randomised(CASES[family].make(target)).eval()


def packed(batches: list[Features]) -> list[Features]:
    """All rows of a batch packed into one, each a segment of its own."""
    found = []
    for batch in batches:
        real = [row[row >= 0].shape[0] for row in batch.segments_BL]
        def joined(tensor: torch.Tensor, real: list[int] = real) -> torch.Tensor:
            return torch.cat([row[:length] for row, length in zip(tensor, real, strict=True)])[None]
        numbers = torch.cat([torch.full((length,), place) for place, length in enumerate(real)])[None]
        found.append(Features(tokens_BL=joined(batch.tokens_BL), supervised_BL=joined(batch.supervised_BL),
                              segments_BL=numbers, positions_BL=joined(batch.positions_BL),
                              final_BLD=joined(batch.final())))
    return found


def test_chances_need_a_temperature_above_0(tiny_target_f64: Target) -> None:
    with pytest.raises(ValueError, match=r"temperature must be above 0, got 0\.0"):
        drawn_text(proposed_text(made("medusa", tiny_target_f64), []), tiny_target_f64, [], 0.0)


def test_states_stored_in_half_precision_are_widened(tiny_target: Target) -> None:
    features = encoded_answers(tiny_target, [Request((5, 20 + at, 7), at, 25) for at in range(4)])
    half = [replace(batch, final_BLD=batch.final().to(torch.float16)) for batch in features]
    drafter = made("medusa", tiny_target)
    expected, found = (drawn_text(proposed_text(drafter, rows), tiny_target, rows).chances_PKR
                       for rows in (features, half))
    torch.testing.assert_close(found.sort(-1).values, expected.sort(-1).values, atol=0.02, rtol=0)


@pytest.mark.parametrize("family", ["medusa", "draft-lm"])
def test_at_a_very_low_temperature_the_drawn_tokens_are_the_greedy_ones(family: str, tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    features = packed(encoded_answers(target, [Request((5, 20 + at, 7), at, 25 + at) for at in range(7)]))
    drafter = made(family, target)
    table_PK, text = rank_table(drafter, features), drawn_text(proposed_text(drafter, features), target, features, 1e-4)
    assert text.drawn_PKR.shape == (*table_PK.shape, 10)
    assert 0 < int((table_PK < 10).sum()) < table_PK.numel()
    assert torch.equal(text.drawn_PKR, torch.nn.functional.one_hot(table_PK, 11)[..., :10].bool())
    # The last token of an answer brings a pass nothing, whatever its chance: the one after it is cut off.
    last_PK = text.left_P[:, None] <= 1 + torch.arange(table_PK.shape[1])
    expected = torch.where(last_PK[..., None], 0.0, text.drawn_PKR.float())[text.left_P > 0]
    torch.testing.assert_close(text.chances_PKR[text.left_P > 0], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["medusa", "hydra", "eagle", "eagle3", "draft-lm", "prompt-tokens"])
def test_of_a_sure_target_the_expected_lengths_are_those_of_replays(family: str, tiny_target_f64: Target) -> None:
    """At a very low temperature nothing is left to chance: passes start where those of decoding do."""
    target, drafter = tiny_target_f64, made(family, tiny_target_f64)
    features = [target.encode(one, drafter.taps)
                for one in encoded_answers(target, [Request((5, 20 + at, 7), at, 25 + at) for at in range(7)])]
    expected = expected_lengths(drawn_text(proposed_text(drafter, features), target, features, 1e-4), WIDE)
    depth = drafter.reach or WIDE.depth
    sizes = [size for size in range(1, WIDE.size + 1) if WIDE.prefix(size).depth <= depth]
    counted = [replay(drafter, target, features, WIDE.prefix(size)).accepted_length for size in sizes]
    assert counted[-1] > 1.05
    assert [expected[size - 1] for size in sizes] == pytest.approx(counted, abs=1e-3)
    greedy = expected_lengths(sure_text(proposed_text(drafter, features)), WIDE)
    assert [greedy[size - 1] for size in sizes] == pytest.approx(counted, abs=1e-6)


def drawn(target: Target, numbers: range) -> list[Request]:
    """Requests that continue passages at temperature 1."""
    return [Request(tuple(passages(5000 + number)[0, :PROMPT].tolist()), number, LENGTH + 20, 1.0)
            for number in numbers]


@pytest.mark.long
def test_the_prediction_is_right_for_other_answers_of_a_trained_target() -> None:
    """Drafts are accepted whole in some passages, where few passes start, and hardly ever in the others."""
    target = trained_target()
    drafter = trained_drafter(target)
    held_out = decode(target, drawn(target, range(48)), DecodeSettings(batch_size=48)).generations
    features = [target.encode(Features.from_rows(
        [([*one.request.tokens, *one.tokens], [False] * PROMPT + [True] * len(one.tokens)) for one in held_out]))]
    tree, _ = search_tree(rank_table(drafter, features), 12)
    text = drawn_text(proposed_text(drafter, features), target, features)
    expected = expected_lengths(text, tree)
    for size in (2, 4, 12):
        measured = decode(target, drawn(target, range(1000, 1100)), DecodeSettings(batch_size=100), drafter=drafter,
                          policy=StaticTree(tree.prefix(size))).accepted_length
        assert expected[size - 1] == pytest.approx(measured, rel=0.05)
        everywhere = sum(float((torch.ones(len(text.left_P)) * _reached(text, tree, node)).mean())
                         for node in range(size))
        assert everywhere > 1.08 * measured, "a mean over all places would be noticed"


def _reached(text: DrawnText, tree: Topology, node: int) -> torch.Tensor:
    """Probability of a node at each place if steps are counted as independent along the text, [P]."""
    if node == 0:
        return torch.ones(len(text.left_P))
    above = _reached(text, tree, tree.parents[node])
    return above * text.chances_PKR[:, tree.depths[node] - 1, tree.ranks[node]]


def written(chances_PKR: torch.Tensor, drawn_PKR: torch.Tensor, left_P: list[int]) -> DrawnText:
    # An answer starts where no pass does.
    rows_P = (torch.tensor(left_P) == 0).long().cumsum(0)
    return DrawnText(chances_PKR=chances_PKR, drawn_PKR=drawn_PKR.bool(), left_P=torch.tensor(left_P), rows_P=rows_P)


def test_a_node_counts_where_the_text_took_its_parents_and_a_pass_starts() -> None:
    """Two answers of 4 and 2 tokens after their first; a place before each, at which no pass starts."""
    chances_PKR = torch.tensor([0.9, 0.5, 0.25, 0.125, 1.0, 0.75, 0.5])[:, None, None].repeat(1, 2, 2)
    drawn_PKR = torch.zeros(7, 2, 2)
    drawn_PKR[1:3, 0, 0] = 1.0
    text = written(chances_PKR, drawn_PKR, [0, 3, 2, 1, 0, 2, 1])
    tree = Topology((-1, 0, 1, 0), (0, 0, 0, 1))
    # One node: passes start at places 1 (two tokens) and 3, then at 5 and 6, where nothing is taken.
    one = 1 + (0.5 + 0.125 + 0.75 + 0.5) / 4
    # The node below it counts at place 1 alone: elsewhere the text did not take its parent.
    two = one + 0.5 / 4
    assert expected_lengths(text, tree) == pytest.approx((1.0, one, two, two + (0.5 + 0.125 + 0.75 + 0.5) / 4))


def test_nodes_beyond_the_table_are_never_accepted_and_no_text_promises_nothing() -> None:
    text = written(torch.full((3, 1, 1), 0.5), torch.zeros(3, 1, 1), [3, 2, 1])
    tree = Topology((-1, 0, 1, 0), (0, 0, 0, 1))
    assert expected_lengths(text, tree) == pytest.approx((1.0, 1.5, 1.5, 1.5))
    assert expected_lengths(written(torch.zeros(0, 1, 1), torch.zeros(0, 1, 1), []), tree) == (1.0,) * 4


def guessed(answers: int, length: int, seed: int) -> ProposedText:
    """Answers of 1 + `length` tokens after prompts of 3, of which two heads guess each with the same chances."""
    generator = torch.Generator().manual_seed(seed)
    places = answers * length
    chances_K8 = torch.full((2, 8), 0.09)
    draws_PK = torch.rand(places, 2, generator=generator)
    truths_PK = (draws_PK[..., None] > chances_K8.cumsum(-1)).sum(-1)
    return ProposedText(
        proposals_PKR=torch.arange(8).expand(places, 2, 8), truths_PK=truths_PK,
        rows_P=torch.arange(answers).repeat_interleave(length), roots_P=torch.arange(3, 3 + length).repeat(answers),
        left_P=torch.arange(length, 0, -1).repeat(answers), texts=())


def test_answers_that_searched_the_tree_promise_more_than_others_keep() -> None:
    """Over many draws: the mean of what is predicted is what is accepted, and nine of ten lie in the interval."""
    promised, predicted, kept, inside = 0.0, 0.0, 0.0, 0
    trials = 60
    for seed in range(trials):
        searched, fresh, later = (guessed(8, 10, 1000 * part + seed) for part in (1, 2, 3))
        tree, _ = search_tree(searched.ranked.ranks_PK, 6)
        found = predicted_lengths(fresh, sure_text(fresh), tree, 6)
        assert found is not None
        assert (found.answers, found.prompt_tokens, found.answer_tokens) == (8, 3.0, 11.0)
        measured = expected_lengths(sure_text(later), tree)[-1]
        interval = Prediction(speedup=1.0, accepted_length=found.lengths[-1], length_error=found.errors[-1],
                              degrees=found.degrees[-1], answers=found.answers).length_interval(8)
        assert interval is not None
        inside += interval[0] <= measured <= interval[1]
        promised += expected_lengths(sure_text(searched), tree)[-1] / trials
        predicted, kept = predicted + found.lengths[-1] / trials, kept + measured / trials
    assert predicted == pytest.approx(kept, rel=0.015)
    assert promised > 1.03 * kept, "the optimism would not be seen"
    assert 0.8 * trials <= inside < trials


def test_the_error_of_answers_with_as_many_passes_is_that_of_their_mean() -> None:
    emitted_A = torch.tensor([14.0, 18.0, 25.0, 16.0, 22.0, 19.0, 15.0, 21.0], dtype=torch.float64)
    error, degrees = relative_errors(emitted_A[:, None], torch.full_like(emitted_A, 10.0)[:, None])
    assert float(error) == pytest.approx(float(emitted_A.std() / 8**0.5 / emitted_A.mean()), rel=0.01)
    assert float(degrees) == 7, "nothing here is heavy-tailed"
    alike = relative_errors(torch.full((4, 1), 6.0).double(), torch.full((4, 1), 3.0).double())
    assert [float(one) for one in alike] == [0.0, 3.0]


def test_nine_of_ten_lie_in_the_interval_where_answers_have_unlike_lengths() -> None:
    """24 answers predict 24 others; long ones, which repeat themselves more, accept more of the drafts."""
    generator = torch.Generator().manual_seed(0)

    def answers(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens after the first, passes) of log-normal lengths of at most 192 tokens, [A, 1]."""
        tokens_A = (3.5 + torch.randn(count, generator=generator)).exp().ceil().clamp(max=192).double()
        accepted_A = torch.sigmoid(0.5 * tokens_A.log() - 3 + 0.9 * torch.randn(count, generator=generator))
        # Accepted tokens of a pass are geometric: the passes of so many tokens follow by the theorem of renewals.
        passes_A = tokens_A * (1 - accepted_A) + (tokens_A * accepted_A * (1 - accepted_A)) ** 0.5 * torch.randn(
            count, generator=generator)
        return tokens_A[:, None], torch.minimum(passes_A.round().clamp(min=1), tokens_A)[:, None]

    trials, inside = 4000, 0
    for _ in range(trials):
        (tokens_A1, passes_A1), (later_A1, passed_A1) = answers(24), answers(24)
        error, degrees = map(float, relative_errors(tokens_A1, passes_A1))
        low, high = Prediction(speedup=1.0, accepted_length=float(tokens_A1.sum() / passes_A1.sum()), answers=24,
                               length_error=error, degrees=degrees).length_interval(24) or (0, 0)
        inside += low <= float(later_A1.sum() / passed_A1.sum()) <= high
    # By draws with replacement, and with 23 degrees of freedom whatever the lengths, 0.84 of them did.
    assert 0.86 <= inside / trials <= 0.92


def test_a_part_of_a_text_ends_after_the_first_tokens_of_its_answers() -> None:
    text = guessed(3, 6, 0).part([0, 2], most=4)
    assert text.rows_P.tolist() == [0] * 6 + [2] * 6
    # Of four tokens the prompt's pass emits the first.
    assert text.left_P.tolist() == [3, 2, 1, 0, 0, 0] * 2
    assert guessed(3, 6, 0).part([1]).left_P.tolist() == [6, 5, 4, 3, 2, 1]
    few = guessed(1, 6, 0)
    assert predicted_lengths(few, sure_text(few), Topology.chain(1), 4) is None, "one answer has no spread"


def test_intervals_widen_with_few_answers_and_with_uncertain_seconds() -> None:
    found = Prediction(speedup=1.5, accepted_length=2.0, length_error=0.04, time_error=0.03, degrees=5, answers=6)
    low, high = found.length_interval(12) or (0, 0)
    # Student's t for five degrees of freedom, and half as much variance for the twelve that are measured.
    assert high / 2 == pytest.approx(2 / low) == pytest.approx(math.exp(2.015 * 0.04 * 1.5**0.5), rel=1e-3)
    slow, fast = found.speedup_interval(12) or (0, 0)
    assert fast / 1.5 == pytest.approx(1.5 / slow) == pytest.approx(
        math.exp(2.015 * math.hypot(0.04 * 1.5**0.5, 0.03)), rel=1e-3)
    # The two measured speeds vary by their own seconds, a standard error of 4 % here.
    _, fast = found.speedup_interval(12, (100.0, 100 * math.exp(2 * 1.96 * 0.04))) or (0, 0)
    assert fast / 1.5 == pytest.approx(math.exp(2.015 * math.hypot(0.04 * 1.5**0.5, 0.03, 0.04, 0.04)), rel=1e-3)
    assert replace(found, length_error=None).length_interval(12) is None
