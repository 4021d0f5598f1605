"""Some layers of the target as a draft model: each step scores as a pass of those layers without cache does."""

import random

import pytest
import torch
from draftsmith.modules import DecodeSettings, DraftLM, DraftLMConfig, StaticTree, Target, Topology, UserError, decode
from draftsmith.modules.baselines.registry import LayerDraft, baseline
from draftsmith.modules.interfaces.proposer import DraftState
from draftsmith.modules.policies.trees import Chain
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.modules.target.partial_passes import skipping
from support.answers import frontier, native_greedy, observe, requests_for
from support.targets import random_target, random_trait
from support.tiers import others_long
from torch import Tensor


@pytest.fixture(scope="module")
def deep_target() -> Target:
    return random_target(5)


def fresh(target: Target, kept: tuple[int, ...], text: list[int]) -> Tensor:
    """Log-probabilities after a text, from one native pass of the kept layers without any cache."""
    with target.native() as model, skipping(target.layers, kept), torch.no_grad():
        return model(torch.tensor([text]), use_cache=False).logits[0, -1].log_softmax(-1)


def check(drafter: LayerDraft, state: DraftState, texts: list[list[int]], bound: float = 1e-9) -> None:
    """Grow a branching tree after the texts and compare every node with a fresh pass over its path."""
    children = [[text[0], text[-1]] for text in texts]
    grandchildren = [[text[0], 17, text[-1]] for text in texts]
    steps = [
        (frontier([0], [-1], [[text[-1]] for text in texts]), [[[]]] * len(texts)),
        (frontier([1, 2], [0, 0], children), [[[a], [b]] for a, b in children]),
        (
            frontier([5, 3, 4], [2, 1, 1], grandchildren),
            [[[b, x], [a, y], [a, z]] for (a, b), (x, y, z) in zip(children, grandchildren, strict=True)],
        ),
    ]
    for asked, paths in steps:
        scores = drafter.expand(state, asked).log_probs_BFHQ
        for row, text in enumerate(texts):
            for column, path in enumerate(paths[row]):
                expected = fresh(drafter.target, drafter.kept, text + path)
                torch.testing.assert_close(scores[row, column, 0], expected, atol=bound, rtol=0)


@pytest.mark.parametrize("kept", [(0,), (0, 1), (0, 2, 4), (1, 3), (0, 1, 2, 3, 4)])
def test_drafting_equals_a_fresh_pass_of_the_same_layers(deep_target: Target, kept: tuple[int, ...]) -> None:
    drafter, rng = LayerDraft(deep_target, kept), random.Random(0)
    state = drafter.start(1, 120)
    text: list[int] = [7]
    # A prompt read at once, then passes that accept one to five tokens, some without a tree in between.
    for new, grown in ((40, True), (1, True), (5, True), (5, False), (5, False), (5, False), (5, True), (2, True)):
        known = len(text) - 1
        text = [*text, *(rng.randrange(4, 90) for _ in range(new))]
        observe(drafter, state, [0], [text[known:]])
        if grown:
            check(drafter, state, [text])


def test_sliding_windows_follow_positions() -> None:
    target = random_target(4, head_dim=8, sliding_window=6)
    drafter = LayerDraft(target, (0, 2, 3))
    state = drafter.start(1, 64)
    observe(drafter, state, [0], [list(range(4, 26))])
    # Gemma 2's own attention takes its softmax in float32.
    check(drafter, state, [list(range(4, 26))], 1e-5)


def test_rows_of_different_lengths_are_added_cleared_and_moved(deep_target: Target) -> None:
    drafter, rng = LayerDraft(deep_target, (0, 3)), random.Random(2)
    state = drafter.start(3, 100)
    texts = [[rng.randrange(4, 90) for _ in range(count)] for count in (3, 30, 9)]

    def grow(row: int, count: int) -> list[int]:
        texts[row] += (new := [rng.randrange(4, 90) for _ in range(count)])
        return [texts[row][-count - 1], *new]

    observe(drafter, state, [0, 1, 2], texts)
    check(drafter, state, texts)
    observe(drafter, state, [0, 1, 2], [grow(0, 4), grow(1, 1), grow(2, 2)])
    check(drafter, state, texts)
    # Row 1 is finished and another prompt takes its place, read in two chunks; the last is a short one.
    state.clear(torch.tensor([1]))
    texts[1] = [rng.randrange(4, 90) for _ in range(26)]
    observe(drafter, state, [1], [texts[1][:21]])
    observe(drafter, state, [1], [texts[1][20:]])
    check(drafter, state, texts)
    observe(drafter, state, [0, 1, 2], [grow(0, 1), grow(1, 3), grow(2, 5)])
    # Row 0 leaves; the last row moves into its place.
    state.keep(torch.tensor([2, 1]))
    texts[0] = texts.pop()
    check(drafter, state, texts)
    observe(drafter, state, [0, 1], [grow(0, 2), grow(1, 1)])
    check(drafter, state, texts)


def test_all_layers_are_accepted_whole(deep_target: Target) -> None:
    requests = requests_for(deep_target, 3, 30)
    result = decode(deep_target, requests, DecodeSettings(batch_size=2, ignore_eos=True),
                    drafter=LayerDraft(deep_target, range(5)), policy=Chain(4))
    expected = [native_greedy(deep_target, request.tokens, request.max_new_tokens) for request in requests]
    assert [generation.tokens for generation in result.generations] == expected
    assert all(count == 5 for generation in result.generations for count in generation.emitted[:-1])


def test_skipping_leaves_the_target_as_it_was(deep_target: Target) -> None:
    text = [5, 6, 7, 8]
    before = fresh(deep_target, tuple(range(5)), text)
    with pytest.raises(RuntimeError, match="on purpose"), skipping(deep_target.layers, (0,)):
        raise RuntimeError("on purpose")
    assert torch.equal(fresh(deep_target, tuple(range(5)), text), before)
    assert all("forward" not in layer.__dict__ for layer in deep_target.layers)


def test_named_choices_of_layers(deep_target: Target) -> None:
    for name, kept in (("first_layers", (0,)), ("layer_skip", (0, 2, 4))):
        drafter, _ = baseline(name, deep_target)
        assert isinstance(drafter, LayerDraft)
        assert drafter.kept == kept


def test_a_tree_over_the_layers_is_lossless(deep_target: Target) -> None:
    requests = requests_for(deep_target, 5, 30)
    result = decode(deep_target, requests, DecodeSettings(batch_size=3, ignore_eos=True, prefill_chunk=5),
                    drafter=LayerDraft(deep_target, (0, 2, 4)),
                    policy=StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])))
    expected = [native_greedy(deep_target, request.tokens, request.max_new_tokens) for request in requests]
    assert [generation.tokens for generation in result.generations] == expected


@pytest.mark.parametrize("kept", [(), (1, 0), (0, 0), (0, 9), (-1, 2)])
def test_impossible_layers_are_refused(tiny_target: Target, kept: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="ascending numbers from 0 to 1"):
        LayerDraft(tiny_target, kept)


@pytest.mark.parametrize("name", others_long(["gpt-oss", "deepseek-v3", "llama4", "mimo-v2-flash"], ["mimo-v2-flash"]))
def test_layers_of_unlike_shape_draft_in_their_places_or_as_a_model_of_their_own(name: str) -> None:
    """Both draft alike: each layer has its own kind, shape and rotation in the smaller model too."""
    target = Target(random_trait(name, torch.float64), tiny_tokenizer(), name=name)
    requests, settings = requests_for(target, 2, 14), DecodeSettings(ignore_eos=True)
    expected = [native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]
    found = []
    for drafter in (LayerDraft(target, (0, 2)), DraftLM.create(DraftLMConfig(layers=(0, 2)), target).eval()):
        answers = decode(target, requests, settings, drafter=drafter, policy=Chain(3)).generations
        assert [answer.tokens for answer in answers] == expected
        found.append([answer.emitted for answer in answers])
    assert found[0] == found[1]


def test_layers_that_read_the_keys_of_earlier_ones_are_refused_apart() -> None:
    target = Target(random_trait("gemma4-e2b", torch.float32), tiny_tokenizer(), name="e2b")
    with pytest.raises(UserError, match="self-speculation would run layers of Gemma4ForCausalLM apart from"):
        LayerDraft(target, range(2))
    with pytest.raises(UserError, match="a draft model of the target's layers would run layers of Gemma4ForCausalLM"):
        DraftLM.create(DraftLMConfig(layers=(0, 1)), target)
