"""Trees whose size is chosen before each pass: the choice, what it learns of rows and seconds, and equal answers."""

import math
import random
from collections.abc import Callable

import pytest
from draftsmith.modules import DecodeSettings, Request, Target, Topology, decode
from draftsmith.modules.baselines.registry import joined_drafter, joined_policy, parse_joined
from draftsmith.modules.decoding import rounds
from draftsmith.modules.policies.paid import ELSE, SHIFTS_X, WIDE, PaidTree, usual_chances
from support.families import CASES, randomised
from support.policies import FirstGuesses, Turns, paths
from support.tiers import some_long

pytestmark = pytest.mark.usefixtures("on_device")
Seconds = Callable[[int, int], float]

TREE = Topology((-1, 0, 0, 1, 1, 3, 2, 5), (0, 0, 1, 0, 1, 0, 0, 0))
CHAIN = Topology.chain(7)


def flat(node: float = 0.1, row: float = 0.0) -> Seconds:
    """Seconds of a step that grow with its nodes, and with its rows."""
    return lambda size, rows: 1 + node * (size - 1) * (1 + row * (rows - 1))


def passes(policy: PaidTree, seconds: Seconds, accepts: Callable[[int], int], count: int,
           rows: int = 1) -> tuple[list[int], float]:
    """(sizes, tokens a second) of some passes in which each row accepts as many guesses as told, if the tree has
    them."""
    sizes, tokens, spent = list[int](), 0.0, 0.0
    for _ in range(count):
        policy.plan(rows)
        depth = policy.topology.prefix(policy.size).depth
        counts = [1 + min(depth, accepts(row)) for row in range(rows)]
        policy.learn(policy.size, counts, seconds(policy.size, rows))
        sizes, tokens, spent = [*sizes, policy.size], tokens + sum(counts), spent + seconds(policy.size, rows)
    return sizes, tokens / spent


def opened(policy: PaidTree, rows: int) -> PaidTree:
    policy.kept([])
    for row in range(rows):
        policy.opened(row)
    return policy


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_that_of_a_search_over_all_sizes(seed: int) -> None:
    """Lengths by the paths of each tree, at each shift of the odds, weighted as they are likely at the start."""
    chance = random.Random(seed)
    seconds = {(size, rows): 1 + chance.random() * size / 8 for size in range(1, 9) for rows in (1, 2)}
    chances = usual_chances(TREE)
    policy = opened(PaidTree(TREE, chances, lambda size, rows: seconds[size, rows]), 2)
    policy.plan(2)
    normal = [math.exp(-0.5 * (shift / WIDE) ** 2) for shift in SHIFTS_X]
    weights = [(1 - ELSE) * one / sum(normal) + ELSE / len(normal) for one in normal]
    mean = sum(weight * shift for weight, shift in zip(weights, SHIFTS_X, strict=True))
    own = [math.exp(-0.5 * (shift - mean) ** 2) for shift in SHIFTS_X]
    rates = {}
    for size in policy.sizes:
        length = 0.0
        for weight, shift in zip(own, SHIFTS_X, strict=True):
            before, product, total = 1.0, 1.0, 1.0
            for depth in range(1, TREE.prefix(size).depth + 1):
                there = sum(chances[node] for node in range(size) if TREE.depths[node] == depth)
                odds = (there / before) / (1 - there / before) * math.exp(shift)
                before, product = there, product * odds / (1 + odds)
                total += product
            length += weight / sum(own) * total
        rates[size] = 2 * length / seconds[size, 2]
    assert policy.size == max(rates, key=lambda size: rates[size])
    assert [len(path) for path in paths(TREE)] == list(TREE.depths)


@pytest.mark.parametrize("chance", [0.6, 0.25])
def test_drafts_that_are_never_accepted_end_within_eight_passes(chance: float) -> None:
    """And the trials afterwards cost little; where guesses become right, they are found again."""
    policy = opened(PaidTree(CHAIN, [chance**depth for depth in range(8)], flat()), 1)
    sizes, _ = passes(policy, flat(), lambda _: 0, 8)
    assert sizes[0] > 1
    assert sizes[-1] == 1
    sizes, speed = passes(policy, flat(), lambda _: 0, 400)
    assert speed >= 0.98
    assert max(sizes) > 1
    assert passes(policy, flat(), lambda _: 7, 200)[0][-1] == 8


def test_drafts_that_are_always_accepted_take_the_largest_size_that_pays() -> None:
    cliff = {1: 1.0, 2: 1.1, 4: 1.2, 8: 3.0}
    for seconds, best in ((flat(0.01), 8), (lambda size, rows: cliff[size], 4)):
        sizes, _ = passes(opened(PaidTree(CHAIN, (), seconds), 1), seconds, lambda _: 7, 120)
        assert sizes.count(best) > 100


def test_a_batch_that_shrinks_has_larger_trees_and_a_row_takes_its_estimate_along() -> None:
    """Passes over many rows grow with their nodes, those over one row do not."""
    seconds = flat(0.02, 1.0)
    policy = opened(PaidTree(CHAIN, (), seconds), 32)
    crowded, _ = passes(policy, seconds, lambda row: 4 if row == 31 else 0, 40, rows=32)
    assert crowded[-1] == 1
    policy.kept([31])
    alone, _ = passes(policy, seconds, lambda _: 4, 10)
    assert alone[0] > 1
    assert alone[-1] == 8
    # Another sequence starts in its place: what the text of all rows was like counts more.
    before = policy._lengths(1)[-1]
    policy.opened(0)
    assert policy._lengths(1)[-1] < before


def test_without_seconds_from_before_each_size_is_timed_once_and_no_larger_one_than_may_pay() -> None:
    policy = opened(PaidTree(CHAIN), 1)
    assert passes(policy, flat(0.05), lambda _: 7, 12)[0] == [1, 2, 4, *[8] * 9]
    assert max(passes(opened(PaidTree(CHAIN), 1), flat(9.0), lambda _: 1, 12)[0]) == 2


def test_one_slow_pass_changes_nothing() -> None:
    policy = opened(PaidTree(CHAIN, (), flat(0.05)), 1)
    passes(policy, flat(0.05), lambda _: 7, 30)
    policy.learn(8, [8], 100.0)
    assert passes(policy, flat(0.05), lambda _: 7, 8)[0].count(8) >= 7


@pytest.mark.parametrize("name", some_long(
    ["eagle", "draft-lm", "medusa", "hydra++", "block-markov", "kangaroo", "prompt-tokens"], 1, 2))
def test_a_drafter_that_observes_later_has_observed_the_same(tiny_target_f64: Target, name: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end and start between drafts."""
    target, seen, found = CASES[name].verifier(tiny_target_f64), list[FirstGuesses](), list[list[list[int]]]()
    drafter = randomised(CASES[name].make(tiny_target_f64))
    asked = [Request((3 + index, 9, 30), index, 9 + 4 * index, (0.0, 1.0)[index % 2]) for index in range(5)]
    for most in (16, 1):
        monkeypatch.setattr(rounds, "MOST_UNREAD", most)
        seen.append(FirstGuesses())
        answers = decode(target, asked, DecodeSettings(batch_size=3, ignore_eos=True), drafter=drafter,
                         policy=Turns(Topology((-1, 0, 0, 1), (0, 0, 1, 0))), observer=seen[-1]).generations
        found.append([one.tokens for one in answers])
    plain = decode(target, asked, DecodeSettings(ignore_eos=True)).generations
    assert found[0] == found[1] == [one.tokens for one in plain]
    assert seen[0].found == seen[1].found
    assert len(seen[0].found) >= 10


def test_a_partner_drafts_where_the_tree_does(tiny_target_f64: Target) -> None:
    parts, own = parse_joined("paid+lookup-3"), randomised(CASES["eagle"].make(tiny_target_f64))
    policy = joined_policy(parts, Turns(TREE), tiny_target_f64)
    assert policy.max_size == TREE.size + 3
    asked = [Request((5, 6, 7, 5, 6), index, 20) for index in range(2)]
    found = decode(tiny_target_f64, asked, DecodeSettings(batch_size=2),
                   drafter=joined_drafter(parts, own, tiny_target_f64), policy=policy).generations
    plain = decode(tiny_target_f64, asked, DecodeSettings()).generations
    assert [one.tokens for one in found] == [one.tokens for one in plain]
