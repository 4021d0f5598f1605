"""Records of the loop: guesses and their authors, guesses by drafter, and states of every token."""

from collections.abc import Sequence

import pytest
import torch
from draftsmith.modules import Chain, DecodeError, Drafter, Ensemble, Features, Policy, Target, Union, decode, stream
from draftsmith.modules.baselines.memories import PromptLookup
from draftsmith.modules.decoding import recorders
from draftsmith.modules.decoding.recorders import GuessedPass, PartCounter, PassRecorder, StateRecorder, WrittenToken
from draftsmith.modules.decoding.requests import DecodeResult, DecodeSettings, Generation, Request
from draftsmith.modules.policies.trees import StaticTree
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.token_tree import TokenTree, Topology
from draftsmith.modules.verification.acceptance_rules import follow
from support.answers import native_greedy
from support.drafters import ScriptedDrafter
from support.families import CASES, randomised
from support.policies import EVERY, medusa

pytestmark = pytest.mark.usefixtures("on_device")

PROMPTS = [(5, 20 + place, 7, 30) for place in range(5)]


def requests(temperature: float = 0.0) -> list[Request]:
    return [Request(tokens, 3 * place, 9 + 2 * place, temperature) for place, tokens in enumerate(PROMPTS)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
def test_every_policy_is_recorded(tiny_target: Target, policy: Policy, temperature: float) -> None:
    recorder = PassRecorder()
    result = decode(tiny_target, requests(temperature), DecodeSettings(batch_size=2, ignore_eos=True),
                        drafter=medusa(tiny_target), policy=policy, observer=recorder)
    for generation in result.generations:
        passes, written = recorder.passes[generation.request.index], recorder.written(generation)
        assert [one.token for one in written] == generation.tokens
        assert len(passes) == len(generation.emitted)
        # A pass adds its accepted guesses and one token of the target's, unless the answer ends before.
        assert [one.accepted + 1 for one in passes][:-1] == generation.emitted[:-1]
        assert passes[-1].accepted + 1 >= generation.emitted[-1]
        assert sum(one.guessed for one in written) == sum(
            min(one.accepted, count) for one, count in zip(passes, generation.emitted, strict=True))
        assert all(one.token not in one.rejected for one in written)
        assert not any(one.rejected for one in written if one.guessed)


@pytest.mark.parametrize(("mode", "guessed", "rejecting"), [("oracle", 8, 0), ("wrong", 0, 10)])
def test_the_authors_of_an_answer(tiny_target: Target, mode: str, guessed: int, rejecting: int) -> None:
    request = Request(PROMPTS[0], 0, 11)
    plain = decode(tiny_target, [request], DecodeSettings(ignore_eos=True)).generations[0].tokens
    recorder = PassRecorder()
    drafter = ScriptedDrafter(tiny_target.vocab_size, [[*PROMPTS[0], *plain]], mode)
    answer, = decode(tiny_target, [request], DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(4),
                     observer=recorder).generations
    written = recorder.written(answer)
    assert [one.token for one in written] == plain
    assert sum(one.guessed for one in written) == guessed
    assert sum(bool(one.rejected) for one in written) == rejecting


def test_a_stream_is_observed_before_its_tokens(tiny_target: Target) -> None:
    recorder = PassRecorder()
    seen = []
    passes = stream(tiny_target, Request(PROMPTS[0], 0, 12), DecodeSettings(ignore_eos=True),
                    drafter=medusa(tiny_target), policy=StaticTree(Topology.from_paths([(0,), (1,), (0, 0)])),
                    observer=recorder)
    for place, _tokens in enumerate(passes):
        seen.append(len(recorder.passes.get(0, [])) - place)
    assert set(seen) == {0}


def test_plain_decoding_guesses_nothing(tiny_target: Target) -> None:
    recorder = PassRecorder()
    answer, = decode(tiny_target, requests()[:1], DecodeSettings(ignore_eos=True), observer=recorder).generations
    assert recorder.passes[0] == [GuessedPass()] * answer.passes
    assert recorder.written(answer) == [WrittenToken(token=token, guessed=False) for token in answer.tokens]


def test_rejected_guesses_are_those_next_to_the_targets_token(tiny_target: Target) -> None:
    # The root has two children; the target takes the second, and neither of its two children, one of them twice.
    topology = Topology.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 2)])
    tree = topology.plant(torch.tensor([[9, 10, 11, 12, 13, 12]]))
    accepted = follow(tree, torch.tensor([[11, 0, 20, 0, 0, 0]]))
    recorder = PassRecorder()
    answer = decode(tiny_target, requests()[:1], DecodeSettings()).generations
    recorder(tree, accepted, answer)
    assert recorder.passes[0] == [GuessedPass(accepted=1, rejected=(12, 13))]
    assert recorder.passes[0][0].written([11, 20]) == [
        WrittenToken(token=11, guessed=True), WrittenToken(token=20, guessed=False, rejected=(12, 13))]
    assert recorder.passes[0][0].written([11]) == [WrittenToken(token=11, guessed=True)]


def test_padding_is_no_guess(tiny_target: Target) -> None:
    tree = TokenTree.from_parents(torch.tensor([[9, 10, 11]]), torch.tensor([[-1, 0, 0]]),
                                  torch.tensor([[True, False, True]]))
    recorder = PassRecorder()
    recorder(tree, follow(tree, torch.tensor([[30, 0, 0]])), decode(tiny_target, requests()[:1],
                                                                   DecodeSettings()).generations)
    assert recorder.passes[0] == [GuessedPass(rejected=(11,))]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_accepted_guess_counts_for_one_drafter(tiny_target_f64: Target, batch_size: int) -> None:
    """With an oracle next to it, lookup gets what it copied rightly and the oracle the rest; cut guesses do not count.
    """
    target = tiny_target_f64
    prompts = [(5 + row, 9, 30) for row in range(3)]
    texts = [[*prompt, *native_greedy(target, prompt, 40)] for prompt in prompts]
    requests = [Request(prompt, row, 11 + row) for row, prompt in enumerate(prompts)]
    ensemble = Ensemble([PromptLookup(target.device, copied=3),
                         ScriptedDrafter(target.vocab_size, texts, "oracle")])
    counter, recorder = PartCounter(), PassRecorder()

    def both(*seen: object) -> None:
        counter(*seen)  # type: ignore[arg-type]
        recorder(*seen)  # type: ignore[arg-type]

    found = decode(target, requests, DecodeSettings(batch_size=batch_size, ignore_eos=True), drafter=ensemble,
                   policy=Union([Chain(3), Chain(3)], 7), observer=both).generations
    counts = counter.counts(found, 2)
    for one in found:
        assert sum(counts[one.request.index]) == sum(token.guessed for token in recorder.written(one))
    assert sum(copied for copied, _ in counts.values()) > 0 < sum(guessed for _, guessed in counts.values())


def test_a_single_drafter_is_not_counted(tiny_target_f64: Target) -> None:
    lookup, counter = PromptLookup(tiny_target_f64.device), PartCounter()
    found = decode(tiny_target_f64, [Request((5, 9, 5, 9), 0, 8)], DecodeSettings(ignore_eos=True), drafter=lookup,
                   policy=Chain(3), observer=counter).generations
    assert counter.held == []
    assert counter.counts(found, 1) == {0: (0,)}


TREE = Topology((-1, 0, 0, 1, 1), (0, 0, 1, 0, 1))


def some_requests(shared: int = 0, temperature: float = 0.0) -> list[Request]:
    """Seven prompts that start with `shared` common tokens, with answers of 1 to 13 tokens."""
    start = tuple(range(10, 10 + shared))
    return [Request((*start, 40 + index, *range(50, 50 + index % 4)), index, 1 + 2 * index, temperature)
            for index in range(7)]


def worst(target: Target, generations: Sequence[Generation], found: dict[int, recorders.RecordedStates]) -> float:
    """The largest difference between recorded states and those of each text read alone; all must be recorded."""
    gap = 0.0
    for one in generations:
        states, text = found[one.request.index], [*one.request.tokens, *one.tokens]
        alone = target.encode(Features.from_rows([(text, [True] * len(text))]), tuple(states.taps))
        assert states.tokens == tuple(text)
        pairs = [(states.final_LD, alone.final()[0]),
                 *((states.taps[layer], tap_1LD[0]) for layer, tap_1LD in alone.taps.items())]
        for mine, theirs in pairs:
            assert mine.shape == theirs.shape
            gap = max(gap, float((mine.double() - theirs.double()).abs().max()))
    return gap


def recorded(target: Target, requests: list[Request], settings: DecodeSettings,
             drafter: Drafter | None = None) -> tuple[DecodeResult, dict[int, recorders.RecordedStates]]:
    """The answers, which recording must not change, and the states; both layers of the target without a drafter."""
    recorder = StateRecorder((0, 1) if drafter is None else drafter.taps, target.dtype)
    policy = None if drafter is None else Chain(2) if drafter.virtual_nodes else StaticTree(TREE)
    plain = decode(target, requests, settings)
    result = decode(target, requests, settings, drafter=drafter, policy=policy, recorder=recorder)
    assert [one.tokens for one in result.generations] == [one.tokens for one in plain.generations]
    return result, recorder.states(result.generations)


@pytest.mark.parametrize("settings", [
    DecodeSettings(batch_size=3),
    DecodeSettings(batch_size=7, ignore_eos=True),
    DecodeSettings(batch_size=2, ignore_eos=True, prefill_chunk=3),
    DecodeSettings(batch_size=3, stop=("a", "e")),
], ids=["ends", "one-batch", "chunks", "stop-texts"])
@pytest.mark.parametrize("shared", [0, 12])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_states_of_plain_decoding_are_those_of_the_whole_text(settings: DecodeSettings, shared: int, temperature: float,
                                                              tiny_target_f64: Target) -> None:
    result, found = recorded(tiny_target_f64, some_requests(shared, temperature), settings)
    assert worst(tiny_target_f64, result.generations, found) < 1e-9


@pytest.mark.parametrize("family", ["medusa", "eagle3", "kangaroo", "prompt-tokens"])
def test_states_of_drafted_answers_are_those_of_the_whole_text(family: str, tiny_target_f64: Target) -> None:
    target = CASES[family].verifier(tiny_target_f64)
    drafter = randomised(CASES[family].make(target))
    result, found = recorded(target, some_requests(), DecodeSettings(batch_size=3), drafter)
    assert worst(target, result.generations, found) < 1e-9


def test_accepted_tokens_have_their_states(tiny_target_f64: Target) -> None:
    """A draft that is always right ends answers inside a path: no pass more is needed for their last tokens."""
    requests = some_requests()
    plain = decode(tiny_target_f64, requests, DecodeSettings(batch_size=3, ignore_eos=True)).generations
    texts = [[*one.request.tokens, *one.tokens, 7, 7, 7, 7] for one in plain]
    drafter = ScriptedDrafter(tiny_target_f64.vocab_size, texts, "oracle")
    result, found = recorded(tiny_target_f64, requests, DecodeSettings(batch_size=3, ignore_eos=True), drafter)
    assert worst(tiny_target_f64, result.generations, found) < 1e-9


def test_states_in_float32_differ_by_rounding(tiny_target: Target) -> None:
    """The largest states are near 5: the bound is some 200 units in their last place."""
    result, found = recorded(tiny_target, some_requests(12), DecodeSettings(batch_size=3))
    assert worst(tiny_target, result.generations, found) < 1e-4


def test_states_are_kept_in_the_format_asked_for(tiny_target: Target) -> None:
    requests, recorder = some_requests(), StateRecorder((1,), torch.bfloat16)
    result = decode(tiny_target, requests, DecodeSettings(batch_size=3), recorder=recorder)
    found = recorder.states(result.generations)
    assert {states.final_LD.dtype for states in found.values()} == {torch.bfloat16}
    assert {states.taps[1].dtype for states in found.values()} == {torch.bfloat16}
    assert recorder.states(result.generations) == {}, "states are handed out once"


def test_a_row_that_stays_for_its_last_token_is_not_counted(tiny_target: Target) -> None:
    settings = DecodeSettings(batch_size=3, ignore_eos=True)
    plain = decode(tiny_target, some_requests(), settings)
    result, _ = recorded(tiny_target, some_requests(), settings)
    assert result.stats.busy_slots == plain.stats.busy_slots
    assert [one.emitted for one in result.generations] == [one.emitted for one in plain.generations]


@pytest.mark.parametrize("last", [False, True], ids=["in-the-prompt", "last-token"])
def test_a_row_that_goes_wrong_has_no_states_and_the_others_have_theirs(last: bool, tiny_target_f64: Target) -> None:
    """A token without a finite embedding ends the row whose prompt holds it; as the last of an answer it only keeps the
    row without states."""
    answer = decode(tiny_target_f64, [Request((5, 20, 7), 0, 6)], DecodeSettings(ignore_eos=True)).generations[0].tokens
    broken = answer[-1] if last else 9
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = float("nan")
    target, recorder = Target(model, tiny_tokenizer(), name="broken"), StateRecorder((), torch.float64)
    size = next(place for place, token in enumerate(answer, 1) if token == broken) if last else 6
    requests = [Request((5, 20, 7) if last else (5, 9, 7), 0, size), *(Request((60 + n, 61), n, 5) for n in (1, 2, 3))]
    settings = DecodeSettings(batch_size=2, ignore_eos=True)
    try:
        result = decode(target, requests, settings, recorder=recorder)
    except DecodeError as error:
        result = error.result
    assert (result.generations[0].finish == "error") == (not last)
    sound = [one for one in result.generations[1:] if broken not in one.tokens]
    assert sound
    found = recorder.states(result.generations)
    assert 0 not in found
    assert worst(target, sound, found) < 1e-9


def test_only_what_a_drafter_taps_is_recorded(tiny_target: Target) -> None:
    drafter = ScriptedDrafter(tiny_target.vocab_size, [], "random")
    with pytest.raises(ValueError, match=r"layers \[1\] are recorded, but the drafter taps \(\)"):
        decode(tiny_target, some_requests(), DecodeSettings(), drafter=drafter, policy=Chain(2),
               recorder=StateRecorder((1,), torch.float32))
