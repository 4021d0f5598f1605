"""Windows of a drafter's own layers: a ring against a cache of everything, its memory, and what is refused."""

import random
from typing import Any

import pytest
import torch
from draftsmith.modules import (
    BlockDraftConfig,
    DraftLM,
    DraftLMConfig,
    Eagle3,
    Eagle3Config,
    FalconConfig,
    HydraConfig,
    Target,
    UserError,
)
from draftsmith.modules.interfaces.proposer import Frontier
from draftsmith.modules.parts.block_cache import BlockRows
from draftsmith.modules.parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock
from draftsmith.modules.target.kv_cache import RowCache
from support.targets import random_target
from torch import Tensor

WINDOW, CPU = 7, torch.device("cpu")
SHAPE = BlockConfig(hidden_size=16, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=8)


def whole(blocks: list[DecoderBlock], hidden_ND: Tensor) -> Tensor:
    """States of a text in one pass, under a mask with the window."""
    order_N = torch.arange(len(hidden_ND))
    after_NN = order_N[:, None] - order_N
    context = AttentionContext(positions_BN=order_N[None], visible_BNW=((after_NN >= 0) & (after_NN < WINDOW))[None])
    for block in blocks:
        hidden_ND = block(hidden_ND[None], context)[0]
    return hidden_ND


def through(blocks: list[DecoderBlock], hidden_BND: Tensor, context: AttentionContext) -> Tensor:
    for block in blocks:
        hidden_BND = block(hidden_BND, context)
    return hidden_BND


def test_a_ring_after_ten_rounds_of_it_equals_a_mask_over_the_whole_text() -> None:
    """Ragged rows, trees after each reading, and readings that make a ring larger which has come round."""
    torch.manual_seed(3)
    blocks = [DecoderBlock(SHAPE, layer).double() for layer in range(2)]
    rows, chance = BlockRows(2, 2, 600, CPU, window=WINDOW), random.Random(5)
    texts, lengths, sizes = torch.randn(2, 430, 16).double(), [0, 0], set[int]()
    expected = [whole(blocks, text) for text in texts]
    while min(lengths) < 380:
        widest = 24 if 150 < lengths[0] < 175 else 5
        counts = [min(chance.randint(0, widest), 400 - length) for length in lengths]
        width = max(counts) or 1
        new = torch.stack([text[length : length + width] for text, length in zip(texts, lengths, strict=True)])
        found = through(blocks, new, rows.read([0, 1], width))
        rows.commit(torch.tensor(counts), counts)
        for row, count in enumerate(counts):
            torch.testing.assert_close(found[row, :count], expected[row][lengths[row] : lengths[row] + count],
                                       atol=1e-9, rtol=1e-9)
            lengths[row] += count
        # A path of nodes 1, 3, 4, 5, and a sibling 2 that none of them sees.
        nodes, drafted = torch.randn(2, 6, 16).double(), list[Tensor]()
        for level, above in (([1, 2], 0), ([3], 1), ([4], 3), ([5], 4)):
            frontier = Frontier(nodes_BF=torch.tensor([level] * 2), parents_BF=torch.full((2, len(level)), above),
                                tokens_BF=torch.zeros(2, len(level), dtype=torch.long))
            drafted.append(through(blocks, nodes[:, level], rows.add_nodes(frontier))[:, 0])
        for row, length in enumerate(lengths):
            path = torch.cat([texts[row, :length], nodes[row, [1, 3, 4, 5]]])
            torch.testing.assert_close(torch.stack([one[row] for one in drafted]), whole(blocks, path)[length:],
                                       atol=1e-9, rtol=1e-9)
        assert rows.cache.storage is not None
        sizes.add(rows.cache.storage.shape[3])
    assert len(sizes) > 2
    assert max(sizes) < 40 < min(lengths) / 9


def test_a_row_keeps_its_ring_when_it_moves() -> None:
    blocks, texts = [DecoderBlock(SHAPE).double()], torch.randn(3, 60, 16).double()
    rows = BlockRows(1, 3, 100, CPU, window=WINDOW)
    for start in range(0, 48, 4):
        through(blocks, texts[:, start : start + 4], rows.read([0, 1, 2], 4))
        rows.commit(torch.tensor([4, 4, 4]), [4, 4, 4])
    rows.cache.keep(torch.tensor([0, 2]))
    rows.cache.clear(torch.tensor([0]))
    found = through(blocks, torch.stack([texts[0, :4], texts[2, 48:52]]), rows.read([0, 1], 4))
    torch.testing.assert_close(found[0], whole(blocks, texts[0, :4]))
    torch.testing.assert_close(found[1], whole(blocks, texts[2, :52])[48:])


def held(cache: RowCache) -> int:
    return sum(part.nbytes for part in cache._written)


def test_the_memory_of_a_draft_at_32k_tokens_is_that_at_the_window() -> None:
    block, bytes_at = DecoderBlock(SHAPE), dict[int, tuple[int, int]]()
    rows, all_of_it = (BlockRows(1, 1, 32_768 + 64, CPU, window=window) for window in (1024, None))
    chunk = torch.randn(1, 512, 16)
    with torch.inference_mode():
        for length in range(512, 32_769, 512):
            keys, values = (torch.randn(1, 1, 512, 8) for _ in range(2))
            # What a pass stores, without the attention of the long one.
            for one in (rows, all_of_it):
                one.read([0], 512)
                one.cache.write(0, keys, values)
                one.commit(torch.tensor([512]), [512])
            bytes_at[length] = held(rows.cache), held(all_of_it.cache)
        through([block], chunk, rows.read([0], 512))
    assert bytes_at[2048][0] == bytes_at[32_768][0] == held(rows.cache) < 2048 * 2 * 8 * 4
    assert bytes_at[32_768][1] >= 32_768 * 2 * 8 * 4


def test_a_draft_of_a_long_answer_keeps_its_window(tiny_target: Target) -> None:
    drafters = {window: Eagle3.create(Eagle3Config(steps=2, window=window), tiny_target) for window in (6, 2**20)}
    for window, drafter in drafters.items():
        state = drafter.start(2, 4096)
        assert state.rows.window == window
        assert state.rows.cache.capacity == min(window, 4096)


@pytest.mark.parametrize(("config", "given", "message"), [
    (Eagle3Config, {"window": 6}, r"window is 6, and a draft of up to 7 tokens reads its own tokens too \(steps 7\); "
     "set window to at least 7, or leave it out"),
    (Eagle3Config, {"window": 5, "steps": 2}, r"draft of up to 6 tokens .* \(steps 2\)"),
    (BlockDraftConfig, {"window": 8, "block_size": 8}, r"window is 8, .* 9 tokens .* \(block_size 8\)"),
    (BlockDraftConfig, {"qk_norm": False}, "qk_norm is false, and the layers of blocks always have norms"),
    (FalconConfig, {"window": 8, "block_size": 3, "blocks": 3}, r"9 tokens .* \(block_size 3, blocks 3\)"),
    (HydraConfig, {"window": 8}, r"window is 8, that of the prefix layer, and prefix is false; set prefix to true"),
    (DraftLMConfig, {"window": 2, "depths": 3}, r"window is 2, and the last of 3 tokens of a pass \(depths\)"),
    (Eagle3Config, {"window": 0}, "window"),
])
def test_windows_that_hold_no_draft_are_refused(config: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**given)


def test_a_llama_with_a_window_is_a_mistral_of_the_same_weights(tiny_target: Target) -> None:
    plain, windowed = (DraftLM.create(DraftLMConfig(layers=(0, 1), window=window), tiny_target) for window in (None, 9))
    assert (plain.architecture.model_type, plain.window) == ("llama", None)
    assert (windowed.architecture.model_type, windowed.window) == ("mistral", 9)
    assert all(torch.equal(one, windowed.state_dict()[name]) for name, one in plain.state_dict().items())
    again = DraftLM.rebuild(windowed.describe(), tiny_target.identity)
    assert (again.window, again.config) == (9, windowed.config)


@pytest.mark.parametrize(("layers", "found"), [((0, 2), 6), ((0, 1), None)])
def test_a_draft_of_windowed_layers_has_their_window(layers: tuple[int, ...], found: int | None) -> None:
    """Every other layer of a Gemma 2 sees the whole text."""
    assert DraftLM.create(DraftLMConfig(layers=layers), random_target(4, head_dim=8, sliding_window=6)).window == found
