"""Copies from a reference: the plain rules, few passes after edits, hardly any drafts where it does not fit."""

import random
from collections.abc import Sequence

import pytest
import torch
from draftsmith.modules import Chain, DecodeError, DecodeSettings, Request, Target, decode
from draftsmith.modules.baselines.memories import ReferenceCopy
from draftsmith.modules.baselines.registry import baseline, joined_drafter, joined_policy, parse_joined
from draftsmith.modules.interfaces.proposer import DraftState
from references.reference_copy import PlainReferenceCopy
from support.answers import greedy_answers, observe, requests_for
from support.artifacts import heads

CPU = torch.device("cpu")


def opened(drafter: ReferenceCopy, *references: Sequence[int], capacity: int = 300) -> DraftState:
    state = drafter.start(len(references), capacity)
    for row, reference in enumerate(references):
        drafter.open(state, torch.tensor([row]), reference=reference, own_text=())
    return state


def drafts_of(drafter: ReferenceCopy, state: DraftState, prompt: list[int], answer: list[int]) -> list[list[int]]:
    """The draft of each pass of one row, whose answer is known."""
    observe(drafter, state, [0], [[*prompt, answer[0]]])
    found, place = list[list[int]](), 0
    while place < len(answer) - 1:
        tree = Chain(drafter.copied).grow(drafter, state, torch.tensor([answer[place]]))
        found.append(tree.tokens_BN[0, 1:].tolist())
        rest = answer[place + 1 :]
        right = next((n for n, (one, own) in enumerate(zip(found[-1], rest, strict=False)) if one != own),
                     min(len(found[-1]), len(rest) - 1))
        observe(drafter, state, [0], [answer[place : place + right + 2]])
        place += right + 1
    return found


def plain_drafts(plain: PlainReferenceCopy, prompt: list[int], answer: list[int]) -> list[list[int]]:
    found, place = list[list[int]](), 0
    while place < len(answer) - 1:
        found.append(drafted := plain.draft([*prompt, *answer[: place + 1]]))
        rest, right = answer[place + 1 :], 0
        while right < min(len(drafted), len(rest) - 1) and drafted[right] == rest[right]:
            right += 1
        if drafted:
            plain.learn(drafted, rest[: right + 1])
        place += right + 1
    return found


def test_drafts_are_those_of_the_plain_rules() -> None:
    rng = random.Random(0)
    for trial in range(80):
        kinds = rng.choice((3, 9, 90))
        reference = [rng.randrange(kinds) for _ in range(rng.randrange(1, 40))]
        answer = [token if rng.random() < 0.85 else rng.randrange(kinds)
                  for token in reference if rng.random() < 0.93] + [1, 2]
        prompt, longest, first = [rng.randrange(kinds) for _ in range(rng.randrange(1, 9))], rng.randrange(1, 6), 2
        drafter = ReferenceCopy(CPU, longest=longest, copied=7, first=first)
        plain = PlainReferenceCopy(reference, longest, 7, first)
        state = opened(drafter, reference, capacity=80)
        assert drafts_of(drafter, state, prompt, answer) == plain_drafts(plain, prompt, answer), trial


def test_an_edit_costs_three_passes_at_most_and_a_wrong_reference_next_to_nothing() -> None:
    rng = random.Random(1)
    reference = [rng.randrange(4, 400) for _ in range(200)]
    edited = [*reference[:50], 401, *reference[51:100], 402, 403, *reference[100:150], *reference[152:]]
    drafter = ReferenceCopy(CPU, copied=64, first=64)
    assert len(drafts_of(drafter, opened(drafter, reference), [1, 2], edited)) <= 2 + 3 * 3
    # By the rules of a new sequence in the same row: nothing of the reference is left.
    state = opened(drafter, reference)
    drafter.open(state, torch.tensor([0]), reference=(), own_text=())
    assert drafts_of(drafter, state, [1, 2], reference[:60]) == drafts_of(drafter, opened(drafter, ()), [1, 2],
                                                                          reference[:60])
    drafter, other = ReferenceCopy(CPU), [rng.randrange(4, 400) for _ in range(1000)]
    drafted = drafts_of(drafter, opened(drafter, reference, capacity=1100), [1, 2], other)
    assert len(drafted) == 999
    assert sum(map(bool, drafted)) < 0.01 * len(drafted)


@pytest.mark.parametrize("policy", ["reference", "static+reference-12", "none+reference"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_without_a_reference(policy: str, temperature: float, tiny_target: Target) -> None:
    requests = requests_for(tiny_target, 6, 30, temperature)
    settings = DecodeSettings(batch_size=3, ignore_eos=True, seed=3)
    plain = [one.tokens for one in decode(tiny_target, requests, settings).generations]
    # Rows with and without a reference, one that fits, an edited one, one that is longer than the row, and none.
    texts = [plain[0], [*plain[1][:9], 7, *plain[1][9:]], (), [5] * 90, plain[4][10:], ()]
    given = [Request(one.tokens, one.index, one.max_new_tokens, temperature, reference=tuple(text))
             for one, text in zip(requests, texts, strict=True)]
    drafter, chain = baseline("reference", tiny_target)
    if policy != "reference":
        name, own = parse_joined(policy), heads(tiny_target)
        drafter, chain = joined_drafter(name, own, tiny_target), joined_policy(name, Chain(1), tiny_target)
    result = decode(tiny_target, given, settings, drafter=drafter, policy=chain)
    assert [one.tokens for one in result.generations] == plain
    assert result.generations[0].passes <= 5
    if temperature == 0:
        assert plain == greedy_answers(tiny_target, requests)


@pytest.mark.parametrize(("given", "message"), [
    ({"reference": (5, 900)}, "prompt 3 has in its reference the token 900; the target's ids are 0 to"),
    ({"reference": (5,) * 4000}, "prompt 3 has a reference of 4000 tokens .* context holds .*; shorten"),
    ({"draft_tokens": (-1,)}, "prompt 3 has in its draft_tokens the token -1"),
])
def test_what_fits_no_target_ends_one_request(given: dict[str, tuple[int, ...]], message: str,
                                              tiny_target: Target) -> None:
    requests = [Request((5, 6), 2, 4), Request((5, 6), 3, 4, **given)]
    drafter, chain = baseline("reference", tiny_target)
    with pytest.raises(DecodeError, match=message) as caught:
        decode(tiny_target, requests, DecodeSettings(), drafter=drafter, policy=chain)
    assert len(caught.value.result.generations[0].tokens) == 4
