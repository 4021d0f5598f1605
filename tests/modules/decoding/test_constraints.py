"""Processors, budgets of thinking and grammars, node by node of a tree: `generate`'s own words with the same ones."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftsmith.modules import (
    DecodeSettings,
    Ensemble,
    Loop,
    Policy,
    Request,
    Target,
    Union,
    UserError,
    baseline,
    decode,
)
from draftsmith.modules.decoding.constraints import Grammar, GrammarRow, ThinkingBudget, constrained, fault_of
from draftsmith.modules.decoding.verifier import DecodeError
from draftsmith.modules.policies.trees import Chain, Eagle2Tree, StaticTree
from draftsmith.modules.target.loading.generation_defaults import TokenBiases
from draftsmith.modules.token_tree import Topology
from support.drafters import ScriptedDrafter, TableDrafter, random_log_probs
from support.families import CASES, randomised
from support.policies import Turns, branching
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as native

PROMPTS = ((5, 9, 33, 71), (7, 21, 8, 64, 30, 12))
PLACES = 24
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"},
                                           "city": {"enum": ["Paris", "London"]}}, "required": ["name", "age", "city"]}
GRAMMARS = (("json_schema", json.dumps(SCHEMA)), ("regex", r"(yes|no)(, (yes|no)){3}\."),
            ("grammar", 'root ::= "abc" [a-z]* "!" | "x" root'))
POLICIES: dict[str, Callable[[], Policy | None]] = {
    "none": lambda: None, "chain": lambda: Chain(3), "eagle2": lambda: Eagle2Tree(9, 4, 3),
    "sampled": lambda: branching(2, 2),
    "static": lambda: StaticTree(Topology((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0)))}
BUDGET = ThinkingBudget(tokens=5, begin=33, end=17, prompt=4)


class Echo(LogitsProcessor):
    """A user's own: the sum of the text moves the logits, and its last token may not come again."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        moved = torch.arange(scores.shape[-1]) * (input_ids.sum() % 7) * 0.02
        return (scores + moved).scatter(1, input_ids[:, -1:], -torch.inf)


def answers(target: Target, requests: list[Request], policy: Policy | None, **settings: Any) -> list[list[int]]:
    """Decoded answers; the drafter knows half of them."""
    drafter = None if policy is None else TableDrafter(random_log_probs(target.vocab_size, target.vocab_size, seed=4))
    return [one.tokens for one in decode(target, requests, DecodeSettings(batch_size=2, **settings), drafter=drafter,
                                         policy=policy).generations]


def expected(target: Target, prompt: tuple[int, ...], **asked: Any) -> list[int]:
    """The greedy answer of the model's own `generate`."""
    with target.native() as model:
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=PLACES, do_sample=False, pad_token_id=0,
                                eos_token_id=list(target.eos_ids), **asked)
    found: list[int] = tokens[0, len(prompt):].tolist()
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Echo, lambda: native.NoRepeatNGramLogitsProcessor(1), lambda: BUDGET,
                                  lambda: native.ForcedEOSTokenLogitsProcessor(4 + PLACES, 2)])
def test_a_processor_is_applied_as_by_generate(tiny_target_f64: Target, policy: str, kind: Callable[[], Any]) -> None:
    target = tiny_target_f64
    requests = [Request(prompt, index, PLACES, processors=(kind(),) * (index != 1))
                for index, prompt in enumerate(PROMPTS)]
    found = answers(target, requests, POLICIES[policy](), repetition_penalty=1.2)
    assert found == [expected(target, prompt, repetition_penalty=1.2, logits_processor=LogitsProcessorList(
        [kind()] * (index != 1))) for index, prompt in enumerate(PROMPTS)]
    assert found[0] != expected(target, PROMPTS[0], repetition_penalty=1.2), "the processor changes nothing here"


def test_thinking_ends_after_its_budget() -> None:
    """Its end mark follows the last token of the budget; what is thought in the prompt does not count."""
    free = torch.zeros(1, 40)
    after: list[tuple[tuple[int, ...], int | None]] = [
        ((33, 1, 2, 3, 4), None), ((33, 1, 2, 3, 4, 5, 6, 7, 8), 17), ((33, 1, 2, 3, 4, 5, 17), None),
        ((1,) * 30, None), ((33, 17, 1, 1, 1, 1, 1, 1, 1), None), ((33, 1, 1, 17, 33, 1, 1, 1, 1, 1), 17),
        ((1, 1, 1, 1, 1, 1, 33, 1, 1, 1, 1, 1), 17)]
    for text, token in after:
        found = BUDGET(torch.tensor([text]), free)
        assert (found is free) if token is None else (found.argmax(), int((found > -torch.inf).sum())) == (token, 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "text"), GRAMMARS)
def test_a_grammar_is_followed_as_by_generate(tiny_target_f64: Target, policy: str, kind: Any, text: str) -> None:
    library, target = pytest.importorskip("xgrammar"), tiny_target_f64
    grammar = Grammar(kind, text)
    compiled = grammar.compiled(target.tokenizer, target.vocab_size, target.eos_ids)
    right = [expected(target, prompt, logits_processor=[library.contrib.hf.LogitsProcessor(compiled)])
             for prompt in PROMPTS]
    requests = [Request(prompt, index, PLACES, grammar=grammar) for index, prompt in enumerate(PROMPTS)]
    free = Request(PROMPTS[0], 7, PLACES)
    found = answers(target, [*requests, free], POLICIES[policy]())
    assert found == [*right, expected(target, PROMPTS[0])]
    # What is forced costs no passes, with a draft that knows nothing and without one.
    result = decode(target, requests, DecodeSettings(batch_size=3))
    assert (result.accepted_length > 3) if kind == "regex" else (result.accepted_length > 1)
    scripted = ScriptedDrafter(target.vocab_size, [[*p, *r] for p, r in zip(PROMPTS, right, strict=True)], "oracle")
    drafted = decode(target, requests, DecodeSettings(), drafter=scripted, policy=Chain(4))
    assert [one.tokens for one in drafted.generations] == right
    assert drafted.accepted_length > max(3, result.accepted_length)


def test_what_a_grammar_forbids_is_not_verified_and_what_it_forces_is_added(tiny_target_f64: Target) -> None:
    pytest.importorskip("xgrammar")
    target = tiny_target_f64
    known = Grammar("regex", "(yes|no) or (left|right)").compiled(target.tokenizer, target.vocab_size, target.eos_ids)
    row = GrammarRow(known, target.tokenizer, target.vocab_size, target.eos_ids)
    y, n, o, e, x = target.tokenizer.encode("ynoex")
    tree = Topology((-1, 0, 0, 1, 1), (0, 0, 1, 0, 1)).plant(torch.tensor([[n, o, x, e, x]]))
    found = constrained(tree, [row])
    texts = [target.tokenizer.decode(found.tokens_BN[0][found.ancestors_BNN[0, node]]) for node in range(found.size)]
    # The text after "n" is forced up to the choice; the guesses x, e and x are gone.
    assert texts == ["no or "[:size] for size in range(1, 7)]
    assert row.allowed((y,)).nonzero()[:, 0].tolist() == [e]
    row.take((n,))
    assert not row.reaches((n,))
    ends = GrammarRow(known, target.tokenizer, target.vocab_size, target.eos_ids)
    ends.take((*target.tokenizer.encode("no or left"), *target.eos_ids[:1]))
    assert ends.allowed((5,)).nonzero()[:, 0].tolist() == list(target.eos_ids)
    assert ends.forced(()) == ()


def test_a_grammar_joins_an_ensemble_and_its_counts(tiny_target_f64: Target) -> None:
    pytest.importorskip("xgrammar")
    target, grammar = tiny_target_f64, Grammar(*GRAMMARS[1])  # type: ignore[arg-type]
    table = TableDrafter(random_log_probs(target.vocab_size, target.vocab_size))
    drafter = Ensemble([baseline("prompt_lookup", target)[0], table])
    found = decode(target, [Request(PROMPTS[0], 0, PLACES, grammar=grammar)], DecodeSettings(), drafter=drafter,
                   policy=Union([Chain(3), Chain(3)], 6)).generations[0]
    assert found.tokens == answers(target, [Request(PROMPTS[0], 0, PLACES, grammar=grammar)], None)[0]


@pytest.mark.parametrize(("kind", "text", "says"), [
    ("json_schema", "{not", "json_schema cannot be compiled: Failed to parse JSON.*; change it"),
    ("json_schema", '{"type": "objekt"}', 'json_schema cannot be compiled: Unsupported type "objekt"; change it'),
    ("json_schema", "[1]", "Schema should be an object or bool, but got .*; change it"),
    ("regex", "(a", "regex cannot be compiled: Regex parsing error at position 3: The parenthesis is not closed.; "),
    ("grammar", "root ::= nope", 'grammar cannot be compiled: .*Rule "nope" is not defined; change it')])
def test_what_the_library_cannot_compile_is_refused_before_anything_is_decoded(kind: Any, text: str, says: str) -> None:
    pytest.importorskip("xgrammar")
    with pytest.raises(UserError, match=says):
        Grammar(kind, text)


def test_rules_that_leave_no_token_end_the_answer_with_a_sentence(tiny_target_f64: Target) -> None:
    pytest.importorskip("xgrammar")
    target = tiny_target_f64
    least = DecodeSettings(biases=TokenBiases(least_tokens=9), batch_size=2)
    requests = [Request(PROMPTS[0], 0, PLACES, grammar=Grammar("regex", "yes")), Request(PROMPTS[1], 1, 9)]
    with pytest.raises(DecodeError, match="prompt 0: no token may follow token 3 of the answer") as e:
        decode(target, requests, least)
    stuck, other = e.value.result.generations
    assert (target.tokenizer.decode(stuck.tokens), stuck.finish, other.finish) == ("yes", "error", "length")
    never = Request(PROMPTS[0], 0, 9, processors=(lambda _text, scores: torch.full_like(scores, -torch.inf),))
    with pytest.raises(DecodeError, match="no token may follow token 0"):
        decode(target, [never], DecodeSettings())


class Counting(Echo):
    """It notes how often it was called."""

    calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        return scores


class Lazy(Echo):
    """It makes a tensor when it is called first, which is no state."""

    made: Any = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.made = torch.ones(1) if self.made is None else self.made
        return scores + self.made


@pytest.mark.parametrize(("one", "says"), [
    (Echo(), ""), (Lazy(), ""), (native.SequenceBiasLogitsProcessor([[[5, 6], 1.0]]), ""), (BUDGET, ""),
    (Counting(), "processor Counting has a state, which the branches"),
    (lambda _, scores: scores + torch.rand(1), "processor <lambda> has a state"),
    (lambda _, scores: scores[:, :3], r"returns the shape \[1, 3\] for logits of \[1, 100\]"),
    (lambda _text, scores, _more: scores, "missing 1 required positional argument"),
    (lambda text, scores: scores / (1 // (text.shape[1] == 2)), "fails on a text that does not"),
    (native.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None), "processor UnbatchedClassifierFree")])
def test_a_processor_with_a_state_is_refused_by_name(one: Any, says: str) -> None:
    found = fault_of([one], (5, 6), 100, torch.device("cpu"))
    assert bool(found) == bool(says)
    if says:
        with pytest.raises(UserError, match=says):
            raise UserError(found)


def test_a_grammars_own_processor_is_refused_for_its_state(tiny_target_f64: Target) -> None:
    library, target = pytest.importorskip("xgrammar"), tiny_target_f64
    compiled = Grammar("regex", "yes").compiled(target.tokenizer, target.vocab_size, target.eos_ids)
    with pytest.raises(DecodeError, match="prompt 0: processor LogitsProcessor fails on a text"):
        decode(target, [Request((5, 6), 0, 9, processors=(library.contrib.hf.LogitsProcessor(compiled),))],
               DecodeSettings())


def test_rules_of_a_text_are_not_recorded(tiny_target_f64: Target) -> None:
    request = Request((5, 6), 0, 9, processors=(Echo(),))
    found = decode(tiny_target_f64, [request], DecodeSettings(graphs=True))
    assert found.stats.graph_refusal == "processors and grammars look at the texts on the host"


def test_a_thinking_budget_takes_the_marks_of_the_tokenizer(tiny_target_f64: Target) -> None:
    with pytest.raises(UserError, match=r"thinking_tokens is 9, but the target does not think.*<think>.*leave it out"):
        ThinkingBudget.of(tiny_target_f64.tokenizer, 9, 4)
    with pytest.raises(UserError, match="thinking_tokens must be at least 0, got -1"):
        ThinkingBudget(tokens=-1, begin=1, end=2, prompt=4)

    class Marked:
        def get_vocab(self) -> dict[str, int]:
            return {"<think>": 8, "</think>": 9}

    assert ThinkingBudget.of(Marked(), 9, 4) == ThinkingBudget(tokens=9, begin=8, end=9, prompt=4)


def test_a_checkpoints_own_settings_of_texts_are_those_of_generate(tiny_target_f64: Target) -> None:
    target, first = tiny_target_f64, expected(tiny_target_f64, PROMPTS[0])
    config = {"no_repeat_ngram_size": 2, "sequence_bias": [[first[:2], -9.0]], "bad_words_ids": [first[2:4], [2]],
              "forced_eos_token_id": 7, "min_new_tokens": PLACES - 1}
    biases = TokenBiases.of(vars(GenerationConfig(**config)), target.eos_ids, target.vocab_size)
    settings = {"biases": biases, "repetition_penalty": 1.3}
    for policy in ("none", "static"):
        found = answers(target, [Request(PROMPTS[0], 0, PLACES)], POLICIES[policy](), **settings)[0]
        assert found == expected(target, PROMPTS[0], repetition_penalty=1.3, **config)
        assert found == expected(target, PROMPTS[0], repetition_penalty=1.3, **biases.of_generate())
    assert found[-1] == 7


def test_a_draft_misses_nothing_of_what_a_grammar_forces_without_it(tiny_target_f64: Target) -> None:
    """Passes without drafts are observed later; what is forced in one of them is several tokens."""
    target = tiny_target_f64
    grammar = Grammar("regex", r"(yes|no)(, (yes|no)){6}\.")
    requests = [Request((5 + row, 6), row, 40, grammar=grammar) for row in (0, 1)]
    drafter = randomised(CASES["eagle"].make(target))
    loop = Loop(target, requests, DecodeSettings(batch_size=2), drafter=drafter,
                policy=Turns(Topology((-1, 0, 0, 1), (0, 0, 1, 0))))
    compared = 0
    for _ in loop.run():
        if len(loop.slots) == 2 and not loop.batch.unread:
            lengths = [cache.lengths_B.tolist() for cache in (loop.rows.cache, loop.state.rows.cache)]
            assert lengths[0] == lengths[1]
            compared += 1
    assert compared > 2
