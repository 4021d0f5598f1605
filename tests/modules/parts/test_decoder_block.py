"""Decoder blocks against a plain twin and transformers' own; their cache: chunks, trees, moved and failed rows."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.modules import Features, Frontier, Target, UserError
from draftsmith.modules.parts.attention import rotate, rotation
from draftsmith.modules.parts.block_cache import BlockRows
from draftsmith.modules.parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock, RMSNorm
from references.decoder_block import block as plain_block
from support.targets import RECURRENT, random_model
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
CONFIG = BlockConfig(**SHAPE, norm_eps=1e-5, rope_base=500.0)
CPU = torch.device("cpu")


def made(config: BlockConfig = CONFIG, dtype: torch.dtype = torch.float64) -> DecoderBlock:
    block = DecoderBlock(config).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return block.requires_grad_(False)


def chain(length: int) -> list[list[int]]:
    return [list(range(place + 1)) for place in range(length)]


def attention(positions: list[int], seen: list[list[int]]) -> AttentionContext:
    visible = torch.zeros(1, len(seen), len(positions), dtype=torch.bool)
    for token, keys in enumerate(seen):
        visible[0, token, keys] = True
    return AttentionContext(positions_BN=torch.tensor([positions]), visible_BNW=visible)


def test_a_block_equals_the_plain_twin_with_any_mask_and_positions() -> None:
    block, hidden = made(), torch.randn(5, 16, dtype=torch.float64)
    positions, seen = [3, 4, 5, 5, 6], [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4]]
    found = block(hidden[None], attention(positions, seen))[0]
    torch.testing.assert_close(found, plain_block(block, hidden, positions, seen), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_equals_transformers_layer_with_the_same_names(base: float, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": base}, attn_implementation="sdpa")
    block = made(BlockConfig(**SHAPE, norm_eps=1e-5, rope_base=base), dtype)
    theirs = LlamaDecoderLayer(config, 0).to(dtype)
    theirs.load_state_dict(block.state_dict())
    hidden, positions = torch.randn(2, 7, 16, dtype=dtype), torch.arange(7).expand(2, -1) + 40
    mask = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, -1, -1)
    turned = LlamaRotaryEmbedding(config)(hidden, positions)
    expected = theirs(hidden, attention_mask=mask[:, None], position_ids=positions, position_embeddings=turned)
    found = block(hidden, AttentionContext(positions_BN=positions, visible_BNW=mask))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_a_norm_has_the_gradients_of_torchs() -> None:
    own, torchs = RMSNorm(16, eps=1e-3), torch.nn.RMSNorm(16, eps=1e-3)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        found, state = [], torch.randn(2, 5, 16, dtype=dtype, requires_grad=True)
        for norm in (own, torchs):
            norm.to(dtype).weight.data = torch.linspace(-1, 2, 16, dtype=dtype)
            normed = norm(state)
            found.append([normed, *torch.autograd.grad((normed * normed.detach().roll(1)).sum(), (state, norm.weight))])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=10 * bound, rtol=bound)


def test_a_norm_of_bfloat16_states_keeps_a_float32_weight_exact() -> None:
    norm, state = RMSNorm(16, eps=1e-6), torch.randn(3, 16).bfloat16().requires_grad_()
    norm.weight.data = torch.linspace(1, 1.01, 16)
    normed = norm(state)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(state.float(), (16,), norm.weight, 1e-6).bfloat16())
    grads = torch.autograd.grad(normed.sum(), (state, norm.weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]


def test_rotated_heads_have_the_gradient_of_the_rotation() -> None:
    turns = rotation(torch.tensor([[3, 0, 7]]), 100.0, 6)
    heads = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda states: rotate(states, turns), heads)
    torch.testing.assert_close(rotate(heads, turns).norm(dim=-1), heads.norm(dim=-1), atol=1e-6, rtol=1e-6)


def test_positions_are_turned_into_angles_once() -> None:
    context = attention([3, 4], chain(2))
    assert context.rotation(CONFIG) is context.rotation(replace(CONFIG, norm_eps=1e-3))
    assert context.rotation(CONFIG) is not context.rotation(replace(CONFIG, rope_base=100.0))


def test_packed_segments_do_not_see_each_other() -> None:
    block, hidden = made(), torch.randn(1, 7, 16, dtype=torch.float64)
    features = Features(
        tokens_BL=torch.zeros(1, 7, dtype=torch.long), supervised_BL=torch.ones(1, 7, dtype=torch.bool),
        segments_BL=torch.tensor([[0, 0, 0, 1, 1, 1, -1]]), positions_BL=torch.tensor([[0, 1, 2, 0, 1, 2, 0]]))
    found = block(hidden, AttentionContext.training(features))
    for part in (slice(0, 3), slice(3, 6)):
        alone = block(hidden[:, part], attention([0, 1, 2], chain(3)))
        torch.testing.assert_close(found[:, part], alone)


def read(rows: BlockRows, block: DecoderBlock, index: list[int], hidden_BND: Tensor, counts: list[int]) -> Tensor:
    """Read counts[b] states of the rows, with huge numbers in the padding."""
    padded = hidden_BND.clone()
    for place, count in enumerate(counts):
        padded[place, count:] = 1e6
    out: Tensor = block(padded, rows.read(index, padded.shape[1]))
    rows.commit(torch.tensor(counts), counts)
    return out


def whole(block: DecoderBlock, hidden_ND: Tensor) -> Tensor:
    """The last output of a text in one pass."""
    out: Tensor = block(hidden_ND[None], attention(list(range(len(hidden_ND))), chain(len(hidden_ND))))
    return out[0]


def test_ragged_chunks_equal_a_whole_reading() -> None:
    block, rows = made(), BlockRows(1, 3, 16, CPU)
    texts = torch.randn(3, 9, 16, dtype=torch.float64)
    read(rows, block, [0, 1, 2], texts[:, :3], [3, 1, 2])
    read(rows, block, [2, 0], torch.stack([texts[2, 2:6], texts[0, 3:7]]), [4, 1])
    last = read(rows, block, [0, 1, 2], torch.stack([texts[0, 4:8], texts[1, 1:5], texts[2, 6:10].new_zeros(4, 16)]),
                [4, 2, 0])
    torch.testing.assert_close(last[0], whole(block, texts[0, :8])[4:])
    torch.testing.assert_close(last[1, :2], whole(block, texts[1, :3])[1:])
    assert rows.cache.host_lengths == rows.cache.lengths_B.tolist() == [8, 3, 6]


def frontier(nodes: list[list[int]], parents: list[list[int]]) -> Frontier:
    return Frontier(nodes_BF=torch.tensor(nodes), parents_BF=torch.tensor(parents), tokens_BF=torch.tensor(nodes))


@pytest.mark.parametrize("capacity", [32, 6])
def test_a_tree_after_ragged_rows_equals_each_path_alone_and_is_discarded(capacity: int) -> None:
    """Two levels that differ by row; node 0, the root, is not in the cache. A small cache grows."""
    block, rows = made(), BlockRows(1, 2, capacity, CPU)
    texts, nodes = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 7, 16, dtype=torch.float64)
    counts = [5, 2]
    read(rows, block, [0, 1], texts, counts)
    levels = [([[1, 2, 3]] * 2, [[0, 0, 0]] * 2), ([[4, 6], [5, 4]], [[3, 1], [1, 1]]), ([[5], [6]], [[4], [5]])]
    above: list[dict[int, list[int]]] = [{0: []}, {0: []}]
    for number, parents in levels:
        asked = torch.stack([nodes[row, number[row]] for row in range(2)])
        found = block(asked, rows.add_nodes(frontier(number, parents)))
        for row in range(2):
            for column, (node, parent) in enumerate(zip(number[row], parents[row], strict=True)):
                above[row][node] = [*above[row][parent], node]
                path = torch.cat([texts[row, : counts[row]], nodes[row, above[row][node]]])
                torch.testing.assert_close(found[row, column], whole(block, path)[-1])
    after = read(rows, block, [0, 1], nodes[:, :1], [1, 1])
    for row in range(2):
        expected = whole(block, torch.cat([texts[row, : counts[row]], nodes[row, :1]]))[-1]
        torch.testing.assert_close(after[row, 0], expected)


def test_a_failed_row_leaves_nothing_in_the_cache() -> None:
    block, rows = made(), BlockRows(1, 3, 16, CPU)
    texts = torch.randn(3, 8, 16, dtype=torch.float64)
    texts[0, 5] = float("nan")
    read(rows, block, [0, 1, 2], texts[:, :6], [6, 6, 3])
    rows.cache.keep(torch.tensor([2, 1]))
    found = read(rows, block, [0, 1], torch.stack([texts[2, 3:5], texts[1, 6:8]]), [2, 2])
    torch.testing.assert_close(found[0], whole(block, texts[2, :5])[3:])
    torch.testing.assert_close(found[1], whole(block, texts[1])[6:])
    rows.cache.clear(torch.tensor([1]))
    fresh = read(rows, block, [0, 1], torch.stack([texts[2, 5:7], texts[1, :2]]), [2, 2])
    torch.testing.assert_close(fresh[1], whole(block, texts[1, :2]))
    assert rows.cache.storage is not None
    assert rows.cache.storage.isfinite().all()


def test_decoding_never_copies_the_whole_cache() -> None:
    block, rows = made(), BlockRows(1, 2, 64, CPU)
    read(rows, block, [0, 1], torch.randn(2, 4, 16, dtype=torch.float64), [4, 4])
    assert rows.cache.storage is not None
    place = rows.cache.storage.data_ptr()
    for _ in range(3):
        attention = rows.add_nodes(frontier([[1, 2]] * 2, [[0, 0]] * 2))
        block(torch.randn(2, 2, 16, dtype=torch.float64), attention)
        read(rows, block, [0, 1], torch.randn(2, 3, 16, dtype=torch.float64), [1, 3])
    rows.read([0, 1], 3)
    keys, _ = rows.cache.write(0, *torch.zeros(2, 2, 2, 3, 6, dtype=torch.float64))
    assert rows.cache.storage.data_ptr() == place == keys.data_ptr()
    assert rows.cache.storage.shape == (2, 2, 2, 64, 6)


def test_a_zero_output_block_adds_nothing_and_gets_gradients() -> None:
    block, hidden = DecoderBlock(CONFIG), torch.randn(1, 4, 16)
    block.zero_output()
    out = block(hidden, attention([0, 1, 2, 3], chain(4)))
    assert torch.equal(out, hidden)
    (out**2).sum().backward()
    assert block.self_attn.o_proj.weight.grad is not None
    assert block.self_attn.o_proj.weight.grad.abs().sum() > 0


def test_a_block_like_the_target_has_its_shape(tiny_target: Target) -> None:
    config = BlockConfig.like(tiny_target)
    assert (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.rope_base) == (32, 64, 4, 2, 8, 10_000.0)
    assert BlockConfig.from_dict({**vars(config)}) == config


@pytest.mark.parametrize(("family", "changes", "expected"), [
    ("Qwen3Moe", {"moe_intermediate_size": 20}, (40, 4, 2, 8)),
    ("Mixtral", {}, (128, 4, 2, 8)),
    ("Qwen3Next", {"shared_expert_intermediate_size": 12}, (44, 4, 2, 8)),
    ("DeepseekV3", {"n_routed_experts": 4, "n_shared_experts": 1, "hidden_size": 256}, (48, 2, 2, 128)),
    ("KimiLinear", {}, (48, 1, 1, 32)),
    ("GraniteMoeHybrid", {}, (64, 4, 2, 8)),
    ("Lfm2", {}, (64, 4, 2, 8)),
])
def test_a_block_next_to_experts_or_latent_attention_is_an_ordinary_one(
    family: str, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Dense, as wide as the experts that a token passes; heads with keys and values of their own."""
    model: Any = random_model(family, **(RECURRENT.get(family, {}) | changes))
    target: Any = SimpleNamespace(config=model.config, hidden_size=model.config.hidden_size)
    config = BlockConfig.like(target)
    assert (config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim) == expected


@pytest.mark.parametrize(("change", "told"), [
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"num_kv_heads": 3}, r"num_kv_heads must divide num_heads \(4\), got 3"),
    ({"head_dim": 5}, "head_dim must be even .* got 5"),
    ({"rope_base": 0.0}, "rope_base must be above 0, got 0.0"),
])
def test_impossible_blocks_are_refused(change: dict[str, float], told: str) -> None:
    with pytest.raises(UserError, match=told):
        BlockConfig(**{**SHAPE, **change})  # type: ignore[arg-type]


def test_a_foreign_description_is_refused() -> None:
    with pytest.raises(UserError, match=r"a decoder block is damaged: its content lacks hidden_size, .*; copy or"):
        BlockConfig.from_dict({"heads": 3})
