"""Trees, commits, rows and packed texts of targets with recurrent layers against the models' own code, and recurrences
over trees in float64 against the same ones along every path, token by token."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from benchmarks.parts.campaign_drafters import make
from draftsmith.modules import DraftLM, DraftLMConfig, Features, Target, TokenTree, Topology, UserError
from draftsmith.modules.target.attention import segment_attention
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.modules.target.recurrent.recurrent_passes import LayerCall
from draftsmith.modules.target.recurrent.scans import delta_rule, linear_attention, mamba1, mamba2
from draftsmith.modules.target.submodel import chosen, smaller
from draftsmith.modules.target.target_rows import TargetRows
from support.policies import commit_path, random_trees
from support.targets import KINDS, RECURRENT, recurrent_model
from torch import Tensor

FAMILIES = [pytest.param(family, marks=[] if place < KINDS else [pytest.mark.long])
            for place, family in enumerate(RECURRENT)]
CLOSE = {"atol": 1e-3, "rtol": 1e-3}
"""The models' own recurrences compute in float32, and norms over outputs near zero amplify what is rounded."""


@cache
def target_of(family: str) -> Target:
    return Target(recurrent_model(family), tiny_tokenizer(), name=family)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def own_logits(target: Target, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits along the text as `generate` computes them: the prompt at once, the answer step by step."""
    with target.native() as model:
        output = model(input_ids=torch.tensor([prompt]), use_cache=True)
        logits = [output.logits[0]]
        for place, token in enumerate(answer, start=len(prompt)):
            output = model(input_ids=torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True,
                           position_ids=torch.tensor([[place]]))
            logits.append(output.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_is_read_as_the_model_reads_its_path(family: str) -> None:
    """Prompts of unlike lengths in two pieces, then trees of unlike shapes and commits of their branches."""
    target, generator = target_of(family), torch.Generator().manual_seed(1)
    rows, lengths = target.start(3, 80), [7, 12, 1]
    texts = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
    for piece in (slice(0, 5), slice(5, 12)):
        parts = [(row, text[piece]) for row, text in enumerate(texts) if text[piece]]
        counts = [len(part) for _, part in parts]
        tokens = torch.tensor([part + [0] * (max(counts) - len(part)) for _, part in parts])
        output = rows.run(TokenTree.prompts(tokens, torch.tensor(counts)), [row for row, _ in parts])
        for place, (row, part) in enumerate(parts):
            wanted = own_logits(target, texts[row][: piece.start + len(part)], [])[piece.start :]
            torch.testing.assert_close(output.logits_BMV[place, : len(part)], wanted, **CLOSE)
        rows.commit(torch.arange(max(counts)).expand(len(parts), -1), torch.tensor(counts), counts, moved=False)
    answers: list[list[int]] = [[], [], []]
    for size in (9, 1, 6, 9):
        tree = random_trees(3, size, generator)
        found = rows.run(tree).logits_BMV
        for row in range(3):
            for node in range(size):
                path = tree.tokens_BN[row, tree.ancestors_BNN[row, node]].tolist()
                wanted = own_logits(target, texts[row], answers[row] + path)[-1]
                torch.testing.assert_close(found[row, node], wanted, **CLOSE)
        ends = torch.randint(0, size, (3,), generator=generator).tolist()
        for answer, taken in zip(answers, commit_path(rows, tree, ends), strict=True):
            answer += taken
        assert_fresh(rows, texts, answers)


def assert_fresh(rows: TargetRows, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """The states of the rows are those after a fresh reading of their texts, the answers in one chain."""
    assert rows.cache.states is not None
    assert rows.cache.states.held
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        fresh = rows.target.start(1, 80)
        for tree in (TokenTree.prompts(torch.tensor([prompt]), torch.tensor([len(prompt)])),
                     Topology.chain(len(answer) - 1).plant(torch.tensor([answer]))):
            if tree.size:
                fresh.run(tree)
                fresh.commit(torch.arange(tree.size)[None], torch.tensor([tree.size]), [tree.size], moved=False)
        assert fresh.cache.states is not None
        assert fresh.cache.states.held.keys() == rows.cache.states.held.keys()
        for place, state in fresh.cache.states.held.items():
            torch.testing.assert_close(rows.cache.states.held[place][row], state[0], **CLOSE, msg=str(place))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_join_leave_and_shrink(family: str) -> None:
    target, generator = target_of(family), torch.Generator().manual_seed(2)
    rows = target.start(4, 80, prefix=[5, 6, 7])
    prefix = [5, 6, 7]
    assert [rows.open(row, row) for row in range(4)] == [3, 3, 3, 3]
    answers: list[list[int]] = [[], [], [], []]
    for _ in range(2):
        tree = random_trees(4, 5, generator)
        rows.run(tree)
        for answer, taken in zip(answers, commit_path(rows, tree, [4, 3, 2, 1]), strict=True):
            answer += taken
    rows.open(1, 4)
    rows.wipe(2)
    rows.keep([1, 3])
    answers = [[], answers[3]]
    tree = random_trees(2, 6, generator)
    found = rows.run(tree).logits_BMV
    for row in range(2):
        path = tree.tokens_BN[row, tree.ancestors_BNN[row, 5]].tolist()
        torch.testing.assert_close(found[row, 5], own_logits(target, prefix, answers[row] + path)[-1], **CLOSE)
    for answer, taken in zip(answers, commit_path(rows, tree, [5, 3]), strict=True):
        answer += taken
    assert_fresh(rows, [prefix] * 2, answers)


def test_a_row_starts_anew_and_keeps_its_state_in_a_pass_that_accepts_none_of_it() -> None:
    target, generator = target_of("Qwen3Next"), torch.Generator().manual_seed(6)
    rows, prompts = target.start(2, 40), torch.randint(3, 100, (3, 6), generator=generator)
    counts = torch.tensor([6, 6])
    rows.run(TokenTree.prompts(prompts[:2], counts))
    rows.commit(torch.arange(6).expand(2, -1), counts, [6, 6], moved=False)
    rows.open(0, 2)
    rows.run(TokenTree.prompts(prompts[2:], counts[:1]), [0])
    rows.commit(torch.arange(6)[None], counts[:1], [6], moved=False)
    tree = random_trees(2, 5, generator)
    rows.run(tree)
    rows.commit(torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0, 1]), [0, 1])
    found = rows.run(tree).logits_BMV
    for row, (prompt, answer) in enumerate(((prompts[2], []), (prompts[1], [int(tree.tokens_BN[1, 0])]))):
        path = tree.tokens_BN[row, tree.ancestors_BNN[row, 4]].tolist()
        torch.testing.assert_close(found[row, 4], own_logits(target, prompt.tolist(), answer + path)[-1], **CLOSE)


@pytest.mark.parametrize("longest", [segment_attention.DENSE_LENGTH, 8], ids=["masked", "by segments"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_a_packed_row_are_read_apart(family: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_attention, "DENSE_LENGTH", longest)
    target, generator = target_of(family), torch.Generator().manual_seed(6)
    lengths = [[9, 1, 14], [24], [3, 17]]
    tokens_BL = torch.randint(3, 100, (3, 24), generator=generator)
    segments_BL, positions_BL = torch.full((3, 24), -1), torch.zeros(3, 24, dtype=torch.int64)
    for row, sizes in enumerate(lengths):
        for number, size in enumerate(sizes):
            start = sum(sizes[:number])
            segments_BL[row, start : start + size] = number
            positions_BL[row, start : start + size] = torch.arange(size)
    features = Features(tokens_BL=tokens_BL, supervised_BL=torch.ones_like(tokens_BL, dtype=torch.bool),
                        segments_BL=segments_BL, positions_BL=positions_BL)
    final_BLD = target.encode(features).final_BLD
    assert final_BLD is not None
    assert final_BLD.isfinite().all()
    for row, sizes in enumerate(lengths):
        for number in range(len(sizes)):
            place = slice(sum(sizes[:number]), sum(sizes[: number + 1]))
            wanted = own_logits(target, tokens_BL[row, place].tolist(), [])
            torch.testing.assert_close(target.logits(final_BLD[row, place]), wanted, **CLOSE)


def test_what_reads_on_after_every_node_is_refused() -> None:
    target = target_of("Lfm2")
    readers: list[Callable[[], Any]] = [partial(make, name, target) for name in (
        "kangaroo", "prompt-tokens", "hidden-transfer", "layer_skip", "first_layers")]
    for reader in (*readers, partial(chosen, target, [0])):
        with pytest.raises(UserError, match="states of Lfm2ForCausalLM's recurrent layers after every token"):
            reader()
    with pytest.raises(UserError, match=r"Lfm2ForCausalLM has recurrent layers; set drafter\.folder"):
        DraftLM(DraftLMConfig(), recurrent_model("Lfm2"), 32)
    assert type(smaller(target, num_layers=2)).__name__ == "LlamaConfig"


@pytest.mark.parametrize("family", ["Jamba", "Bamba", "FalconH1"])
def test_hybrids_load_in_half_precision(family: str) -> None:
    """Their configurations derive the kinds of layers, which an excerpt has fewer of."""
    Target(recurrent_model(family).bfloat16(), tiny_tokenizer(), name=family)


def test_the_multipliers_of_falcon_h1_are_applied() -> None:
    model = recurrent_model("FalconH1", embedding_multiplier=5.65, lm_head_multiplier=0.039)
    Target(model, tiny_tokenizer(), name="FalconH1")


def test_a_row_of_padding_alone_is_encoded() -> None:
    blank = torch.zeros(1, 4, dtype=torch.int64)
    features = Features(tokens_BL=blank, supervised_BL=blank > 0, segments_BL=blank - 1, positions_BL=blank)
    assert target_of("Qwen3Next").encode(features).final_BLD is not None


def test_no_tree_is_sent_inside_a_native_block() -> None:
    target = target_of("Lfm2")
    with target.native():
        with target.native():
            pass
        with pytest.raises(ValueError, match="inside its native"):
            target.start(1, 8).run(TokenTree.prompts(torch.tensor([[5, 6]]), torch.tensor([2])))
    target.start(1, 8).run(TokenTree.prompts(torch.tensor([[5, 6]]), torch.tensor([2])))


def test_a_fast_kernel_gets_by_place_what_the_layer_gave_by_place() -> None:
    """Its names are its own, as those of causal-conv1d are."""
    def kernel(x: torch.Tensor, weight: torch.Tensor, activation: str = "") -> tuple[torch.Tensor, str]:
        return x * weight, activation

    call = LayerCall(kernel, ("hidden_states", "weight"),
                     {"hidden_states": torch.ones(2), "weight": torch.full((2,), 3.0), "activation": "silu"})
    found, activation = call.again(hidden_states=torch.full((2,), 2.0))
    assert (found.tolist(), activation) == ([6.0, 6.0], "silu")


ROWS, NODES = 2, 12


def along(given: dict[str, Any], row: int, path: list[int], state: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(output of the last token, state after it) by the recurrence as its paper writes it."""
    state, out = state.clone(), state
    for node in path:
        if kind == "mamba1":
            time = torch.nn.functional.softplus(given["dt"][row, :, node] + given["delta_bias"])
            value = given["hidden_states"][row, :, node]
            state = torch.exp(given["A"] * time[:, None]) * state + (time * value)[:, None] * given["B"][row, :, node]
            out = state @ given["C"][row, :, node] + given["D"] * value
            out = out * torch.nn.functional.silu(given["z"][row, :, node])
        elif kind == "mamba2":
            time = torch.nn.functional.softplus(given["dt"][row, node] + given["dt_bias"])
            value = given["hidden_states"][row, node]
            heads = len(time) // given["B"].shape[2]
            key, query = (given[name][row, node].repeat_interleave(heads, dim=0) for name in ("B", "C"))
            decay = torch.exp(given["A"] * time)[:, None, None]
            state = decay * state + (time[:, None] * value)[..., None] * key[:, None]
            out = (state * query[:, None]).sum(-1) + given["D"][:, None] * value
        else:
            heads = given["value"].shape[2] // given["key"].shape[2]
            query, key = (given[name][row, node].repeat_interleave(heads, dim=0) for name in ("query", "key"))
            query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
            decay = given["g"][row, node].exp()
            state = state * (decay[..., None] if decay.dim() == 2 else decay[:, None, None])
            error = given["value"][row, node] - (state * key[..., None]).sum(1)
            state = state + key[..., None] * (given["beta"][row, node][:, None] * error)[:, None]
            out = (state * query[..., None]).sum(1) / query.shape[-1] ** 0.5
    return out, state


def random_inputs(kind: str, generator: torch.Generator) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "mamba1":
        return {"hidden_states": normal(ROWS, 6, NODES), "dt": normal(ROWS, 6, NODES), "A": -normal(6, 3).exp(),
                "B": normal(ROWS, 3, NODES), "C": normal(ROWS, 3, NODES), "D": normal(6), "z": normal(ROWS, 6, NODES),
                "delta_bias": normal(6), "delta_softplus": True}
    if kind == "mamba2":
        return {"hidden_states": normal(ROWS, NODES, 4, 5), "dt": normal(ROWS, NODES, 4), "A": -normal(4).exp(),
                "B": normal(ROWS, NODES, 2, 3), "C": normal(ROWS, NODES, 2, 3), "D": normal(4), "dt_bias": normal(4),
                "dt_softplus": True}
    decays = (ROWS, NODES, 4, 5) if kind == "delta rule by channel" else (ROWS, NODES, 4)
    return {"query": normal(ROWS, NODES, 2, 5), "key": normal(ROWS, NODES, 2, 5), "value": normal(ROWS, NODES, 4, 3),
            "g": -normal(*decays).exp(), "beta": normal(ROWS, NODES, 4).sigmoid(), "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("strong", [False, True], ids=["", "strong decays"])
@pytest.mark.parametrize("kind", ["delta rule", "delta rule by channel", "mamba2", "mamba1"])
def test_every_node_follows_its_path(kind: str, strong: bool) -> None:
    """Two passes: the second starts from the states that a commit of the first left."""
    generator = torch.Generator().manual_seed(0)
    nodes = {"mamba1": mamba1, "mamba2": mamba2}.get(kind, delta_rule)
    state: Tensor | None = None
    for _ in range(2):
        tree, given = random_trees(ROWS, NODES, generator), random_inputs(kind, generator)
        if strong:
            # Decays that differ by factors no number format holds: what is not above a node must not reach it.
            for name in ("g", "A"):
                if name in given:
                    given[name] = 400 * given[name]
        out, branches = nodes(given, state, tree)
        shape = {"mamba1": (6, 3), "mamba2": (4, 5, 3)}.get(kind, (4, 5, 3))
        before = torch.zeros(ROWS, *shape, dtype=torch.float64) if state is None else state
        for row in range(ROWS):
            for node in range(NODES):
                path = tree.ancestors_BNN[row, node].nonzero()[:, 0].tolist()
                expected, after = along(given, row, path, before[row], kind)
                found = out[row, :, node] if kind == "mamba1" else out[row, node]
                torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-11)
                padded = torch.tensor([path + [0] * (NODES - len(path))] * ROWS)
                left = branches.after(padded, torch.full((ROWS,), len(path)))
                torch.testing.assert_close(left[row], after, atol=1e-12, rtol=1e-11)
        ends = [tree.ancestors_BNN[row, NODES - 1 - row].nonzero()[:, 0].tolist() for row in range(ROWS)]
        counts = torch.tensor([len(path) for path in ends])
        state = branches.after(torch.tensor([path + [0] * (NODES - len(path)) for path in ends]), counts)


@pytest.mark.parametrize("strongest", [16.0, 1600.0, 1e6])
def test_weak_decays_after_strong_ones_keep_their_digits(strongest: float) -> None:
    """The sum of a long path's decays is large, and what counts is a difference of two such sums."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 64, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    query, key = (part / part.norm(dim=-1, keepdim=True) for part in (query, key))
    decays = torch.full((1, 1, 64, 1), -0.05, dtype=torch.float64)
    decays[:, :, ::4] = -strongest
    given = (query, key, value, decays, torch.full_like(decays, 0.5))
    tree = Topology.chain(63).plant(torch.zeros(1, 64, dtype=torch.int64))
    expected, wide = linear_attention(*given, None, tree)
    found, narrow = linear_attention(*(part.float() for part in given), None, tree)
    path = torch.arange(64)[None], torch.tensor([64])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(narrow.after(*path).double(), wide.after(*path), atol=2e-6, rtol=1e-5)
