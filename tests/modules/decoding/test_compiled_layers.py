"""Compiled layers write the same answers, with a bounded number of graphs, and say where they cannot be compiled."""

from collections.abc import Iterator

import pytest
import torch
from draftsmith.modules import DecodeSettings, Policy, Proposer, Request, StaticTree, Target, Topology, baseline, decode
from draftsmith.modules.decoding.requests import DecodeResult
from draftsmith.modules.policies.ensemble import Ensemble, Union
from draftsmith.modules.target.devices.compiled_layers import MOST_GRAPHS, Compiler, bounded
from draftsmith.modules.target.linear_forms import Packing
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.families import CASES, randomised
from support.targets import random_target
from support.tiers import some_long
from torch import Tensor, nn

TREE = Topology((-1, 0, 0, 1, 2), (0, 0, 1, 0, 1))
ADDING_NO_LAYERS = ("prompt-tokens", "hidden-transfer")
"""Cases whose drafters have no layers to compile: the target's own layers guess."""
GRAPHS = 4  # Graphs of one kind of layer: with one row or several, and one token or several


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def unpacked(backend: str = "eager", dtype: torch.dtype = torch.float32) -> Target:
    """The tiny target with plain linear layers, which can be compiled."""
    target = Target(tiny_model(dtype=dtype), tiny_tokenizer(), name="tiny-random", pack=0)
    target.compiler = Compiler(backend)
    return target


def answered(target: Target, *, compiled: bool, rows: int = 3, temperature: float = 0.0, length: int = 12,
             drafter: Proposer | None = None, policy: Policy | None = None) -> DecodeResult:
    prompts = [tuple((5 + 3 * row + place) % 90 + 4 for place in range(6 + row)) for row in range(rows)]
    requests = [Request(prompt, row, length, temperature) for row, prompt in enumerate(prompts)]
    return decode(target, requests, DecodeSettings(batch_size=3, ignore_eos=True, compile=compiled), drafter=drafter,
                  policy=policy)


def tokens(result: DecodeResult) -> list[list[int]]:
    return [generation.tokens for generation in result.generations]


@pytest.mark.parametrize("name", some_long(["medusa", "hydra++", "eagle3-layers", "falcon", "kangaroo", "prompt-tokens",
                                  "hidden-transfer", "draft-lm"], 9))
def test_every_family_drafts_the_same_with_compiled_layers(name: str) -> None:
    """The number of passes too: a drafter whose compiled layers gave other states would guess other tokens."""
    target = unpacked()
    drafter = randomised(CASES[name].make(target)).eval()
    plain, quick = (answered(target, compiled=compiled, drafter=drafter, policy=StaticTree(TREE))
                    for compiled in (False, True))
    assert tokens(quick) == tokens(plain)
    assert [one.emitted for one in quick.generations] == [one.emitted for one in plain.generations]
    assert quick.stats.compile_refusal == ""
    assert target.compiler.graphs > 0
    assert bool(drafter._forms and drafter._forms.forwards) != (name in ADDING_NO_LAYERS)
    # Compiled, a drafted answer is the plain loop's too.
    assert tokens(quick) == tokens(answered(target, compiled=True))


def test_sampled_answers_of_compiled_layers_are_those_of_the_plain_loop() -> None:
    target = unpacked()
    drafter = randomised(CASES["medusa"].make(target)).eval()
    drafted = answered(target, compiled=True, temperature=0.8, drafter=drafter, policy=StaticTree(TREE))
    assert tokens(drafted) == tokens(answered(target, compiled=True, temperature=0.8))
    assert tokens(drafted) == tokens(answered(target, compiled=False, temperature=0.8))
    assert drafted.stats.compile_refusal == ""
    assert target.compiler.graphs > 0


def test_drafters_that_draft_together_are_compiled() -> None:
    target = unpacked()
    drafter = randomised(CASES["eagle"].make(target)).eval()
    copying, policy = baseline("prompt_lookup", target)
    both = Ensemble([copying, drafter])
    joined = Union([policy, StaticTree(TREE)], policy.max_size + TREE.size)
    plain, quick = (answered(target, compiled=compiled, drafter=both, policy=joined) for compiled in (False, True))
    assert tokens(quick) == tokens(plain)
    assert quick.stats.compile_refusal == ""


@pytest.mark.parametrize("name", ["first_layers", "layer_skip"])
def test_the_targets_own_layers_draft_compiled(name: str) -> None:
    target = unpacked()
    drafter, policy = baseline(name, target)
    plain, quick = (answered(target, compiled=compiled, drafter=drafter, policy=policy) for compiled in (False, True))
    assert tokens(quick) == tokens(plain)
    assert quick.stats.compile_refusal == ""
    assert target.compiler.graphs > 0


@pytest.mark.long
def test_windows_and_capped_scores_are_those_of_each_layer() -> None:
    """Every second layer of a Gemma 2 has a window."""
    target = random_target(3, sliding_window=8, attn_logit_softcapping=5.0)
    target.compiler = Compiler("eager")
    plain, quick = (answered(target, compiled=compiled, length=24) for compiled in (False, True))
    assert tokens(quick) == tokens(plain)
    assert quick.stats.compile_refusal == ""


@pytest.mark.long
def test_batches_trees_and_lengths_of_any_size_share_four_graphs() -> None:
    """Of all layers of the target: symbols stand for rows and tokens, and no layer has graphs of its own."""
    target = unpacked()
    for rows in (1, 2, 3):
        for size in (2, 3, 5):
            drafter, _ = baseline("recycling", target)
            answered(target, compiled=True, rows=rows, length=5 + size, drafter=drafter,
                     policy=StaticTree(TREE.prefix(size)))
        answered(target, compiled=True, rows=rows, length=20)
    assert target.compiler.graphs == GRAPHS
    assert target.compiler.refusal == ""


def test_a_second_run_makes_no_graph_and_counts_no_seconds() -> None:
    target = unpacked()
    first, second = (answered(target, compiled=True).stats for _ in range(2))
    assert first.compile_seconds > 0
    assert second.compile_seconds == 0


def test_without_the_setting_nothing_is_compiled() -> None:
    target = unpacked()
    answered(target, compiled=False)
    assert target.compiler.graphs == 0
    assert all("forward" not in vars(layer) for layer in target.layers)


def test_compiled_forms_are_gone_after_each_pass() -> None:
    target = unpacked()
    answered(target, compiled=True)
    assert all("forward" not in vars(layer) for layer in target.layers)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_packed_layers_are_not_compiled(tiny_target: Target) -> None:
    result = answered(tiny_target, compiled=True)
    if tiny_target.linears.packed is None:
        pytest.skip("this build packs no linear layers")
    assert "packed for oneDNN, which no graph can hold (set target.pack: 0)" in result.stats.compile_refusal
    assert tokens(result) == tokens(answered(tiny_target, compiled=False))


def test_layers_that_are_unpacked_later_are_compiled() -> None:
    target = Target(tiny_model(), tiny_tokenizer(), name="tiny-random")
    target.compiler = Compiler("eager")
    if answered(target, compiled=True, rows=1, length=2).stats.compile_refusal:
        target.linears.use(Packing(packed_from=0))
    assert answered(target, compiled=True, rows=1, length=2).stats.compile_refusal == ""
    assert target.compiler.graphs > 0


class Curious(nn.Module):
    """A layer's part that reads a number from its device, which no graph can hold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden) if float(hidden.sum()) < 1e9 else hidden
        return found


def test_a_layer_that_cannot_be_compiled_runs_as_it_is() -> None:
    target, plain = unpacked(), answered(unpacked(), compiled=False)
    for layer in target.layers:
        layer.mlp = Curious(layer.mlp)  # type: ignore[assignment, arg-type]
    result = answered(target, compiled=True)
    assert tokens(result) == tokens(plain)
    assert result.stats.compile_refusal.startswith("torch.compile fails here (")
    assert "\n" not in result.stats.compile_refusal


def test_a_backend_that_fails_is_named_and_what_was_begun_is_finished() -> None:
    target = unpacked()
    compiled = answered(target, compiled=True, rows=1, length=1)
    target.compiler.backend = "no-such-backend"
    result = answered(target, compiled=True)
    assert compiled.stats.compile_refusal == ""
    assert "no-such-backend" in result.stats.compile_refusal
    assert tokens(result) == tokens(answered(target, compiled=False))


def test_a_layer_that_hands_on_too_little_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    target = unpacked()
    whole = type(target.layers[0]).forward
    plain = tokens(answered(target, compiled=False))

    def narrow(self: nn.Module, *args: object, apart: bool = False, **kwargs: object) -> object:
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(type(target.layers[0]), "forward", narrow)
    result = answered(target, compiled=True)
    assert tokens(result) == plain
    assert "does not hand on what its attention is to be" in result.stats.compile_refusal


def test_a_layer_of_several_layers_of_the_cache_runs_as_it_is() -> None:
    target = unpacked()
    target.layers[1].mlp.layer_idx = 7  # type: ignore[union-attr, assignment]
    result = answered(target, compiled=True)
    assert result.stats.compile_refusal == (
        "LlamaDecoderLayer writes to the layers [1, 7] of the cache; a compiled layer must write to one")
    assert tokens(result) == tokens(answered(target, compiled=False))


def test_a_function_with_too_many_forms_is_computed_without_graphs() -> None:
    compiler = Compiler("eager")
    form = compiler.compiled(lambda x, word: x + len(word))
    for length in range(MOST_GRAPHS + 3):
        # A graph is made for each text.
        with bounded():
            found = form(torch.zeros(2), "a" * length)
        torch.testing.assert_close(found, torch.full((2,), float(length)))
    assert compiler.graphs == MOST_GRAPHS
    assert compiler.refusal.startswith("torch.compile fails here (")


def test_the_watcher_sees_every_graph() -> None:
    compiler, seen = Compiler("eager"), list[bool]()
    form = compiler.compiled(lambda x: x + 1)
    with compiler.watched(seen.append):
        form(torch.zeros(3))
        form(torch.zeros(4))
    form(torch.zeros(4, 4))
    assert compiler.graphs == 2
    assert seen == [True, False]


@pytest.mark.long
@pytest.mark.slow
def test_inductor_gives_the_same_answers() -> None:
    """The compiler that a user gets, in float32, on a machine with a C++ compiler: many seconds for each graph."""
    target = unpacked("inductor")
    drafter = randomised(CASES["eagle3"].make(target)).eval()
    plain, quick = (answered(target, compiled=compiled, drafter=drafter, policy=StaticTree(TREE))
                    for compiled in (False, True))
    if quick.stats.compile_refusal:
        pytest.skip(quick.stats.compile_refusal)
    assert tokens(quick) == tokens(plain) == tokens(answered(target, compiled=False))
