"""Attention in two parts equals one softmax: in numbers, in passes of whole targets, in decoded answers.

A stand-in for the flash kernel runs on the CPU (`references/flash_attention.py`); tests marked `gpu` run the kernel."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.modules import DecodeSettings, Request, StaticTree, Target, Topology, decode
from draftsmith.modules.target import partial_passes
from draftsmith.modules.target.attention import two_parts
from draftsmith.modules.target.attention.segment_attention import PLAIN, AttentionForm, additive
from draftsmith.modules.target.attention.tree_attention import attend_masked
from draftsmith.modules.target.attention.two_parts import TreeParts, attend_in_parts, takes_parts
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.modules.target.partial_passes import PassLayout
from draftsmith.modules.token_tree import TokenTree, VirtualNodes
from references.flash_attention import flash, forced, kernel
from support.devices.waits import WIDE, drafted
from support.targets import TRAITS, random_model
from torch import Tensor

LENGTHS = (0, 1, 17, 40)
BOUNDS = {torch.float64: 2e-15, torch.float32: 1e-6}


def random_trees(rows: int, size: int, generator: torch.Generator) -> TokenTree:
    """Trees of unlike shapes."""
    ancestors_BNN = torch.eye(size, dtype=torch.bool).repeat(rows, 1, 1)
    for row in range(rows):
        for node in range(1, size):
            parent = int(torch.randint(node, (), generator=generator))
            ancestors_BNN[row, node] |= ancestors_BNN[row, parent]
    tree = Topology.chain(size - 1).plant(torch.full((rows, size), 7))
    return replace(tree, ancestors_BNN=ancestors_BNN, depths_BN=ancestors_BNN.sum(-1) - 1)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(("heads", "groups", "size", "scaling"), [(6, 2, 9, None), (4, 4, 1, 0.3), (8, 1, 33, None)])
def test_the_joined_parts_are_one_softmax(dtype: torch.dtype, heads: int, groups: int, size: int,
                                          scaling: float | None) -> None:
    """Over trees of unlike rows, one of them without a committed token, in a cache with more slots than are in use."""
    generator = torch.Generator().manual_seed(size)
    slots = max(LENGTHS) + size + 3
    query = torch.randn(len(LENGTHS), heads, size, 8, generator=generator, dtype=dtype)
    key, value = torch.randn(2, len(LENGTHS), groups, slots + 5, 8, generator=generator, dtype=dtype)[..., :slots, :]
    tree, lengths_B1 = random_trees(len(LENGTHS), size, generator), torch.tensor(LENGTHS)[:, None]
    layout = PassLayout.of(tree, lengths_B1, slots, 1_000)
    expected = attend_masked(query, key, value, additive(layout.visible_BNW[:, None], dtype),
                             AttentionForm(scaling=scaling), None, None, None)
    with forced():
        found = attend_in_parts(query, key, value, scaling, TreeParts.of(tree, lengths_B1))
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert float((found - expected).abs().max()) <= BOUNDS[dtype]


def test_a_query_that_sees_nothing_gets_zero() -> None:
    """Alone in its row, or next to nodes that see something; of a row with committed tokens each query sees those."""
    tree = Topology.chain(2).plant(torch.full((2, 3), 7))
    parts = TreeParts.of(replace(tree, ancestors_BNN=tree.ancestors_BNN & (torch.arange(3) != 0)[:, None]),
                         torch.tensor([[0], [4]]))
    query, key, value = torch.randn(3, 2, 2, 9, 8).unbind()
    with forced():
        found = attend_in_parts(query[:, :, :3], key, value, None, parts)
    assert bool(found.isfinite().all())
    assert not bool(found[0, 0].any())
    expected = (query[1:, :, :1] @ key[1:, :, :4].mT * 8**-0.5).softmax(-1) @ value[1:, :, :4]
    torch.testing.assert_close(found[1:, :1], expected.transpose(1, 2))


# Whole targets --------------------------------------------------------------------------------------------------------


def passes(target: Target) -> list[Tensor]:
    """Logits of three tree passes of rows of unlike lengths after two prompts, of which a path is committed, and of a
    pass of one row alone."""
    rows, found = target.start(2, 64), list[Tensor]()
    prompt_BN = torch.arange(24).view(2, 12) % 90 + 4
    rows.run(TokenTree.prompts(prompt_BN, torch.tensor([12, 5])))
    rows.commit(torch.arange(12).expand(2, -1), torch.tensor([12, 5]), [12, 5])
    for start in (20, 40, 60):
        found.append(rows.run(WIDE.plant(torch.arange(start, start + 10).view(2, 5))).logits_BMV)
        rows.commit(torch.tensor([[0, 2, 4], [0, 1, 2]]), torch.tensor([3, 1]), [3, 1])
    found.append(rows.run(WIDE.plant(torch.arange(30, 35)[None]), rows=[1]).logits_BMV)
    return found


@pytest.mark.parametrize(("family", "share"), [
    ("Llama", 1), ("GPT2", 1), ("gemma4", 0.5), ("Gemma2", 0), ("gpt-oss", 0), ("deepseek-v3", 0), ("Doge", 0)])
def test_layers_of_whole_targets_attend_in_two_parts_where_they_may(family: str, share: float) -> None:
    """Windows, bounded scores, sinks, values of another width and masks that a layer makes keep one softmax."""
    name, changes = TRAITS.get(family, (family, {}))
    target = Target(random_model(name, **changes).double(), tiny_tokenizer(), name=family)
    expected = passes(target)
    with forced() as layers:
        found = passes(target)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert layers["asked"] == 4 * target.num_layers
    assert layers["took"] == share * layers["asked"]


@pytest.mark.parametrize("name", ["eagle3", "kangaroo", "prompt-tokens"])
def test_greedy_answers_are_those_of_one_softmax(tiny_target_f64: Target, name: str) -> None:
    """Of rows that come and go; with layers that a drafter runs first, and with virtual nodes, which keep it."""
    requests = [Request(tuple(range(9 + row, 20 + 3 * row)), row, 16) for row in range(3)]

    def answers() -> list[Any]:
        torch.manual_seed(0)
        drafter, policy = drafted(name, StaticTree(WIDE))(tiny_target_f64, tiny_target_f64)
        found = decode(tiny_target_f64, requests, DecodeSettings(batch_size=2, ignore_eos=True), drafter=drafter,
                       policy=policy)
        return [(one.tokens, one.emitted) for one in found.generations]

    expected = answers()
    with forced() as layers:
        assert answers() == expected
    assert (layers["took"] > 0) == (layers["asked"] > 0) == (name != "prompt-tokens")


# What the kernel is given ---------------------------------------------------------------------------------------------


def states(*, width: int = 64, dtype: torch.dtype = torch.bfloat16, device: str = "meta", groups: int = 2,
           slots: int = 30) -> tuple[Tensor, Tensor, Tensor, TreeParts]:
    """Queries of 8 heads of 5 nodes, keys and values of 2 rows in a cache, and what goes with them."""
    query = torch.ones(2, 8, 5, width, dtype=dtype, device=device)
    key, value = torch.ones(2, 2, groups, slots + 3, width, dtype=dtype, device=device)[:, :, :, :slots]
    numbers = torch.arange(3, dtype=torch.int32, device=device)
    parts = TreeParts(slots_BC=torch.arange(5, device=device).expand(2, -1), lengths_B=numbers[:2], rows_B=numbers,
                      hidden_BNC=torch.zeros(2, 5, 5, device=device), mask=torch.zeros(2, 1, 5, slots, device=device))
    return query, key, value, parts


def test_torch_takes_these_arguments() -> None:
    """By the shapes and number formats that it says the kernel answers with."""
    query, key, value, parts = states()
    out, sums = two_parts.committed(query, key, value, 0.1, parts)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (sums.shape, sums.dtype) == (query.shape[:3], torch.float32)
    joined = attend_in_parts(query, key, value, None, parts)
    assert (tuple(joined.shape), joined.dtype, joined.is_contiguous()) == ((2, 5, 8, 64), torch.bfloat16, True)


@pytest.mark.parametrize(("changes", "form", "taken"), [
    ({}, PLAIN, True), ({}, AttentionForm(scaling=0.3), True), ({"dtype": torch.half, "width": 256}, PLAIN, True),
    ({"device": "cpu"}, PLAIN, False), ({"dtype": torch.float32}, PLAIN, False), ({"width": 12}, PLAIN, False),
    ({"width": 264}, PLAIN, False), ({"groups": 16}, PLAIN, False), ({}, AttentionForm(window=9), False),
    ({}, AttentionForm(chunk=9), False), ({}, AttentionForm(softcap=9.0), False),
    ({}, AttentionForm(sinks_H=torch.zeros(8)), False)], ids=str)
def test_what_the_kernel_cannot_do_keeps_one_softmax(changes: dict[str, Any], form: AttentionForm, taken: bool,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_parts, "refusal", lambda *_: "")
    monkeypatch.setattr(two_parts, "DEVICES", ("meta",))
    query, key, value, parts = states(**changes)
    assert takes_parts(query, key, value, parts.mask, form, parts) == taken
    # Another mask, values of another width, values that are stored in another way than keys.
    assert not takes_parts(query, key, value, torch.zeros_like(parts.hidden_BNC), form, parts)
    assert not takes_parts(query, key, value[..., :8], parts.mask, form, parts)
    assert not takes_parts(query, key, value.contiguous(), parts.mask, form, parts)


def test_prompts_virtual_nodes_and_short_rows_have_no_parts() -> None:
    tree, lengths_B1 = WIDE.plant(torch.zeros(2, 5, dtype=torch.long)), torch.tensor([[3], [9_000]])

    def parts(tree: TokenTree, width: int) -> TreeParts | None:
        return PassLayout.of(tree, lengths_B1, width, 10_000).parts

    assert parts(tree, 9_005) is not None
    assert parts(tree, two_parts.FEWEST_SLOTS - 1) is None
    assert parts(TokenTree.prompts(tree.tokens_BN, torch.tensor([5, 2])), 9_005) is None
    anchors = torch.zeros(2, 1, dtype=torch.long)
    virtual = VirtualNodes(embedded_BMD=torch.zeros(2, 1, 4), anchors_BM=anchors, slots_BM=anchors, slots=1)
    assert parts(replace(tree, virtual=virtual), 9_005) is None


# A kernel that is wrong -----------------------------------------------------------------------------------------------


def in_base_two(*args: Any, **named: Any) -> Any:
    out, sums, *others = flash(*args, **named)
    return out, sums / 0.6931, *others


def of_all_slots(*args: Any, seqused_k: Tensor, **named: Any) -> Any:
    return flash(*args, seqused_k=torch.full_like(seqused_k, args[6]), **named)


def of_other_rows(*args: Any, **named: Any) -> Any:
    out, sums, *others = flash(*args, **named)
    return out, sums.T.reshape(sums.shape), *others


def missing(*_args: Any, **_named: Any) -> Any:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nException raised from elsewhere")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("function", "said"), [
    (flash, ""), (in_base_two, "differs from one softmax by"), (of_all_slots, "differs from one softmax by"),
    (of_other_rows, "differs from one softmax by"), (missing, r"fails \(FlashAttention only supports Ampere.*\)")])
def test_a_kernel_that_is_wrong_is_found_out_once(function: Callable[..., Any], said: str, dtype: torch.dtype,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """And said once; while a graph is captured nothing is tried."""
    query, key, _, _ = states(dtype=dtype, device="cpu")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with kernel(function), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert two_parts.refusal(query, key) == "has not been tried"
        answers = [two_parts.refusal(query, key) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert answers[0] == answers[1]
    assert re.fullmatch(rf"{said}( (nan|[\d.e-]+))?", answers[0])
    texts = [str(one.message) for one in warned]
    assert len(texts) == (said != "")
    assert all("long rows are read by one softmax" in text and answers[0] in text for text in texts)


def test_a_kernel_that_fails_leaves_one_softmax_to_the_passes(tiny_target_f64: Target,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    expected = passes(tiny_target_f64)
    monkeypatch.setattr(partial_passes, "FEWEST_SLOTS", 1)
    monkeypatch.setattr(two_parts, "DEVICES", ("cpu",))
    monkeypatch.setattr(two_parts, "FORMATS", (torch.float64,))
    with kernel(missing), pytest.warns(UserWarning, match="slower: the flash kernel fails .* on cpu for") as said:
        found = passes(tiny_target_f64)
    assert len(said) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "groups", "width"), [(32, 8, 128), (16, 16, 64), (8, 1, 256), (9, 3, 64)])
def test_the_kernel_of_a_device_is_right(heads: int, groups: int, width: int, dtype: torch.dtype) -> None:
    query = torch.zeros(1, heads, 5, width, dtype=dtype, device="cuda")
    assert two_parts.refusal(query, query[:, :groups]) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
def test_answers_of_a_device_are_those_of_one_softmax(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least chosen logit may be a near-tie, so log-probabilities are compared as far as the tokens are equal."""
    target = Target(random_model("Llama", head_dim=64).bfloat16(), tiny_tokenizer(), name="llama").to("cuda")
    requests = [Request(tuple(range(9 + row, 40 + 9 * row)), row, 24) for row in range(3)]

    def answers() -> list[Any]:
        torch.manual_seed(0)
        given = DecodeSettings(batch_size=2, ignore_eos=True, graphs=graphs, logprobs=True)
        drafter, policy = drafted("eagle3", StaticTree(WIDE))(target, target)
        return decode(target, requests, given, drafter=drafter, policy=policy).generations

    expected = answers()
    monkeypatch.setattr(partial_passes, "FEWEST_SLOTS", 1)
    for one, other in zip(answers(), expected, strict=True):
        pairs = list(enumerate(zip(one.tokens, other.tokens, strict=True)))
        equal = next((place for place, (new, former) in pairs if new != former), len(pairs))
        assert equal > 0
        assert one.logprobs[:equal] == pytest.approx(other.logprobs[:equal], abs=0.1)
    assert "" in two_parts._REFUSALS.values()
