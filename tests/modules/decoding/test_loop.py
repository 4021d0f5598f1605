"""The loop's housekeeping: slots, refill, deadline, streaming, chunked prompts, limits."""

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.modules import Chain, DecodeSettings, Generation, Request, Target, UserError, decode, stream
from draftsmith.modules.decoding.loop import Loop
from draftsmith.modules.decoding.recorders import StateRecorder
from draftsmith.modules.decoding.requests import first_stop, shared_prefix
from draftsmith.modules.target.loading.generation_defaults import TokenBiases
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from support.drafters import ScriptedDrafter

pytestmark = pytest.mark.usefixtures("on_device")


def some_requests(count: int, new_tokens: int = 12) -> list[Request]:
    return [Request((5, 20 + index % 60, 7, 30), index, new_tokens + index % 5) for index in range(count)]


def test_a_finished_row_is_replaced_at_once(tiny_target: Target) -> None:
    requests = some_requests(23)
    stats = decode(tiny_target, requests, DecodeSettings(batch_size=4, ignore_eos=True)).stats
    # The first token of an answer comes from its prompt's pass; every other one fills a slot of a pass.
    assert stats.busy_slots == sum(request.max_new_tokens - 1 for request in requests)
    assert stats.total_slots == 4 * stats.target_calls
    longest = max(request.max_new_tokens for request in requests)
    assert stats.target_calls <= stats.busy_slots / 4 + longest


def test_results_keep_the_order_of_the_requests(tiny_target: Target) -> None:
    requests = some_requests(9)[::-1]
    result = decode(tiny_target, requests, DecodeSettings(batch_size=3))
    assert [generation.request for generation in result.generations] == requests


@pytest.mark.parametrize("chunk", [1, 3, 4, 512])
def test_chunked_prompts_change_nothing(tiny_target_f64: Target, chunk: int) -> None:
    requests = [Request(tuple(range(4, 4 + length)), length, 13) for length in (1, 3, 9, 4)]
    whole = decode(tiny_target_f64, requests, DecodeSettings(ignore_eos=True))
    texts = [[*generation.request.tokens, *generation.tokens] for generation in whole.generations]
    drafter = ScriptedDrafter(tiny_target_f64.vocab_size, texts, "oracle")
    chunked = decode(tiny_target_f64, requests, DecodeSettings(batch_size=3, prefill_chunk=chunk, ignore_eos=True),
                     drafter=drafter, policy=Chain(3))
    assert [g.tokens for g in chunked.generations] == [g.tokens for g in whole.generations]
    # The oracle knows a row only by what it observed: whole acceptance proves that prompts arrive unbroken.
    assert chunked.accepted_length == 4


@pytest.mark.parametrize("shared", [0, 7, 8, 20])
def test_a_common_beginning_is_read_once_and_changes_nothing(tiny_target_f64: Target, shared: int) -> None:
    beginning = tuple(range(10, 10 + shared))
    requests = [Request((*beginning, 40 + index, *range(50, 50 + index % 4)), index, 9) for index in range(7)]
    alone = [decode(tiny_target_f64, [request], DecodeSettings(ignore_eos=True)).generations[0].tokens
             for request in requests]
    for chunk in (3, 512):
        result = decode(tiny_target_f64, requests, DecodeSettings(batch_size=3, prefill_chunk=chunk, ignore_eos=True))
        assert [generation.tokens for generation in result.generations] == alone


def test_the_common_beginning_leaves_each_prompt_a_token() -> None:
    assert shared_prefix([tuple(range(20)), tuple(range(12))], 512) == tuple(range(11))
    assert shared_prefix([tuple(range(20)), (*range(12), 99)], 512) == tuple(range(12))
    assert shared_prefix([tuple(range(20)), tuple(range(20))], 10) == tuple(range(10))
    assert shared_prefix([tuple(range(20))], 512) == ()
    assert shared_prefix([tuple(range(5)), tuple(range(5))], 512) == ()


def test_nothing_is_started_after_the_deadline(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, now = some_requests(6), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert decode(tiny_target, requests, DecodeSettings(), deadline=-1.0).generations == []

    def slow(_generation: Generation, _tokens: list[int], _done: bool) -> None:
        now[0] += 0.01

    part = decode(tiny_target, requests, DecodeSettings(batch_size=2, ignore_eos=True), on_tokens=slow, deadline=0.05)
    assert 2 <= len(part.generations) < 6
    assert all(len(g.tokens) == g.request.max_new_tokens for g in part.generations)


def test_the_deadline_ends_answers_that_have_the_least(tiny_target: Target) -> None:
    requests, recorder = some_requests(6), StateRecorder((0,), torch.float32)
    whole = decode(tiny_target, requests, DecodeSettings(ignore_eos=True)).generations
    assured = [replace(one, least=3) for one in requests[:4]] + requests[4:]
    cut = decode(tiny_target, assured, DecodeSettings(batch_size=2, ignore_eos=True), recorder=recorder,
                 deadline=time.monotonic() - 1).generations
    assert [one.tokens for one in cut] == [one.tokens[:3] for one in whole[:4]], "others are not started"
    assert {one.finish for one in cut} == {"length"}
    assert [len(states.tokens) for states in recorder.states(cut).values()] == [4 + 3] * 4


def test_prompts_of_like_length_are_read_together(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [40, *[6] * 9, *[38] * 8, 5]
    requests = [Request(tuple(range(20, 20 + length)), index, 4) for index, length in enumerate(lengths)]
    # Nothing is shared: a common start is read once for all.
    requests[0] = replace(requests[0], tokens=(5, *requests[0].tokens[1:]))
    read, chunk = list[list[int]](), Loop._prefill_chunk

    def noted(self: Loop, rows: list[int], prompts: Any, offset: int) -> Any:
        read.append([len(prompt) for prompt in prompts])
        return chunk(self, rows, prompts, offset)

    monkeypatch.setattr(Loop, "_prefill_chunk", noted)
    found = decode(tiny_target_f64, requests, DecodeSettings(batch_size=19)).generations
    assert read == [[40, *[38] * 8], [*[6] * 9, 5]]
    for one in (found[0], found[3], found[18]):
        assert decode(tiny_target_f64, [one.request], DecodeSettings()).generations[0].tokens == one.tokens


def test_streaming_gives_the_same_tokens(tiny_target: Target) -> None:
    request = some_requests(1, 20)[0]
    whole = decode(tiny_target, [request], DecodeSettings()).generations[0].tokens
    assert [token for block in stream(tiny_target, request, DecodeSettings()) for token in block] == whole


def test_a_single_new_token_needs_no_pass(tiny_target: Target) -> None:
    result = decode(tiny_target, [Request((5, 6), 0, 1)], DecodeSettings())
    assert len(result.generations[0].tokens) == 1
    assert result.stats.target_calls == 0
    assert result.accepted_length == 0.0


def test_an_answer_may_fill_the_context_to_the_brim(tiny_target: Target) -> None:
    request = Request((5,) * 500, 0, 12)
    drafter = ScriptedDrafter(tiny_target.vocab_size, [], "random")
    plain = decode(tiny_target, [request], DecodeSettings(ignore_eos=True)).generations[0].tokens
    drafted = decode(tiny_target, [request], DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(6))
    assert drafted.generations[0].tokens == plain
    assert len(plain) == 12


def test_no_requests_no_work(tiny_target: Target) -> None:
    result = decode(tiny_target, [], DecodeSettings(batch_size=4))
    assert result.generations == []
    assert result.stats.total_slots == 0


def test_a_policy_without_a_drafter_is_refused(tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        decode(tiny_target, some_requests(1), DecodeSettings(), policy=Chain(2))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: DecodeSettings(batch_size=0), "batch_size must be at least 1, got 0"),
    (lambda: DecodeSettings(top_p=0.0), "top_p must be above 0"),
    (lambda: DecodeSettings(top_k=-1), "top_k must be at least 0"),
    (lambda: DecodeSettings(min_p=1.5), "min_p must be from 0 to 1, got 1.5"),
    (lambda: DecodeSettings(stop=("x", "")), "stop must not hold an empty text"),
    (lambda: DecodeSettings(repetition_penalty=0.0), "repetition_penalty must be above 0 and finite, got 0.0"),
])
def test_bad_settings_are_one_sentence(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=message):
        make()


def byte_tokenizer() -> Any:
    """One token a byte, so that most characters beyond ASCII take several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def first_stop_of_whole(tokenizer: Any, before: list[int], new: list[int], stops: tuple[str, ...]) -> int | None:
    """The plain twin of `first_stop`: it decodes the whole answer for every token."""
    for count in range(1, len(new) + 1):
        text = tokenizer.decode([*before, *new[:count]], skip_special_tokens=False)
        if any(stop in text for stop in stops):
            return count
    return None


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_stop_texts_are_found_as_in_the_whole_answer(kind: str) -> None:
    rng = random.Random(2)
    tokenizer = byte_tokenizer() if kind == "bytes" else tiny_tokenizer()
    letters = "ab é漢🙂\n" if kind == "bytes" else "ab \n"
    found = 0
    for _ in range(400):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(1, 90)))
        stops = tuple("".join(rng.choice(letters) for _ in range(rng.randrange(3, 7))) for _ in range(2))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        place = 0
        while place < len(tokens):
            size = rng.randrange(1, 7)
            before, new = tokens[:place], tokens[place : place + size]
            wanted = first_stop_of_whole(tokenizer, before, new, stops)
            assert first_stop(tokenizer, before, new, stops) == wanted
            if wanted is not None:
                found += 1
                break
            place += size
    assert found > 20


def test_stop_texts_decode_a_window_of_the_answer() -> None:
    class Counting:
        decoded = 0

        def decode(self, tokens: list[int], **_options: Any) -> str:
            self.decoded += len(tokens)
            return "x" * len(tokens)

    counting = Counting()
    assert first_stop(counting, list(range(2000)), [5, 6, 7], ("stop", "end")) is None
    assert counting.decoded < 100


def test_stop_texts_end_an_answer_at_their_token_wherever_a_draft_has_it(tiny_target_f64: Target) -> None:
    """Seven tokens a pass: the stop text is completed by each of them in turn."""
    target, request = tiny_target_f64, Request((5, 20, 7, 30), 0, 16)
    whole = decode(target, [request], DecodeSettings(ignore_eos=True)).generations[0].tokens
    oracle = ScriptedDrafter(target.vocab_size, [[*request.tokens, *whole]], "oracle")
    for count in range(1, len(whole) + 1):
        stop = target.tokenizer.decode(whole[:count], skip_special_tokens=False)
        found = decode(target, [request], DecodeSettings(ignore_eos=True, stop=(stop,)), drafter=oracle,
                       policy=Chain(6)).generations[0]
        assert (found.tokens, found.finish) == (whole[:count], "stop")


def test_biases_by_place_are_those_of_each_node_of_a_draft(tiny_target_f64: Target) -> None:
    """An end token may come inside the draft whose root must not end, and a token that begins no answer after it."""
    target, prompt = tiny_target_f64, (5, 20, 7, 30)
    whole = decode(target, [Request(prompt, 0, 16)], DecodeSettings(ignore_eos=True)).generations[0].tokens
    end = whole[5]
    assert end not in whole[:5], "the answer would end before"
    for settings in ({"min_new_tokens": 4}, {"min_new_tokens": 9}, {"begin_suppress_tokens": [end]}):
        with target.native() as model:
            answer = model.generate(torch.tensor([prompt], device=target.device), max_new_tokens=16, do_sample=False,
                                    eos_token_id=end, pad_token_id=0, **settings)[0].tolist()
        oracle = ScriptedDrafter(target.vocab_size, [answer], "oracle")
        biases = TokenBiases.of(settings, (end,), target.vocab_size)
        found = decode(target, [Request(prompt, 0, 16)], DecodeSettings(eos_ids=(end,), biases=biases), drafter=oracle,
                       policy=Chain(6))
        assert [*prompt, *found.generations[0].tokens] == answer, settings


@pytest.mark.real
def test_real_greedy_decoding_equals_generate(real_target: Target) -> None:
    """The real model, ragged batch: identical to `generate`, or first different where the top two logits nearly tie."""
    prompts = ["What is the capital of France?", "Write two sentences about rain.", "Count from one to twelve."]
    tokenizer = real_target.tokenizer
    requests = [Request(tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}],
                                                            add_generation_prompt=True)["input_ids"]), index, 40)
                for index, text in enumerate(prompts)]
    result = decode(real_target, requests, DecodeSettings(batch_size=3))
    for request, generation in zip(requests, result.generations, strict=True):
        with real_target.native() as model:
            expected = model.generate(torch.tensor([request.tokens]), max_new_tokens=40, do_sample=False)
        wanted = expected[0, len(request.tokens) :].tolist()
        if generation.tokens != wanted:
            place = next(i for i, (a, b) in enumerate(zip(generation.tokens, wanted, strict=False)) if a != b)
            with real_target.native() as model, torch.no_grad():
                top = model(torch.tensor([[*request.tokens, *wanted[:place]]])).logits[0, -1].topk(2).values
            assert float(top[0] - top[1]) < 1e-4


def test_the_counts_of_two_runs_add_up(tiny_target: Target) -> None:
    first = decode(tiny_target, some_requests(3), DecodeSettings()).stats
    second = decode(tiny_target, some_requests(2), DecodeSettings()).stats
    calls = first.target_calls + second.target_calls
    first.add(second)
    assert first.target_calls == calls
    assert first.lossless
    assert "lossless" not in first.amounts()
