"""The row cache: after any commits it holds what a fresh prefill of the committed tokens would."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from draftsmith.modules import DecodeSettings, Eagle2Tree, Request, Target, TokenTree, Topology, decode
from draftsmith.modules.target import kv_cache
from draftsmith.modules.target.kv_cache import RowCache
from draftsmith.recipes.counted_work import CountedStorages
from support.families import CASES, randomised
from support.policies import commit_path, random_trees

pytestmark = pytest.mark.usefixtures("on_device")


def test_commits_moves_and_clears_leave_a_fresh_prefill(tiny_target_f64: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = tiny_target_f64.start(3, 64)
    texts: list[list[int]] = [[], [], []]
    for step in range(6):
        tree = random_trees(3, 7, generator)
        rows.run(tree)
        ends = torch.randint(0, 7, (3,), generator=generator).tolist()
        for text, taken in zip(texts, commit_path(rows, tree, ends), strict=True):
            text += taken
        if step == 2:
            rows.cache.forget(1)
            texts[1] = []
    rows.keep([2, 1])
    for row, text in ((0, texts[2]), (1, texts[1])):
        fresh = tiny_target_f64.start(1, 64)
        fresh.run(TokenTree.prompts(torch.tensor([text]), torch.tensor([len(text)])))
        assert rows.cache.host_lengths[row] == len(text) == int(rows.cache.lengths_B[row])
        assert rows.cache.storage is not None
        assert fresh.cache.storage is not None
        torch.testing.assert_close(rows.cache.storage[:, row, :, : len(text)],
                                   fresh.cache.storage[:, 0, :, : len(text)])


def test_the_cache_stays_in_its_place_while_there_is_room(tiny_target: Target) -> None:
    rows = tiny_target.start(2, 32)
    tree = TokenTree.prompts(torch.full((2, 3), 7), torch.tensor([3, 2]))
    rows.run(tree)
    assert rows.cache.storage is not None
    place = rows.cache.storage.data_ptr()
    for _ in range(5):
        rows.commit(torch.arange(3).expand(2, -1), torch.tensor([3, 2]), [3, 2], moved=False)
        rows.run(tree)
    rows.keep([1])
    assert rows.cache.storage.data_ptr() == place


def test_a_full_row_is_refused(tiny_target: Target) -> None:
    rows = tiny_target.start(1, 4)
    with pytest.raises(ValueError, match="need 5 cache slots, it has 4"):
        rows.run(TokenTree.prompts(torch.full((1, 5), 7), torch.tensor([5])))


def test_level_rows_are_written_as_ragged_ones_are(tiny_target_f64: Target) -> None:
    """Rows of one length are copied as a block; the same two rows next to a longer one are scattered."""
    texts, tree = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]]), TokenTree.prompts
    level, ragged = tiny_target_f64.start(2, 12), tiny_target_f64.start(3, 12)
    ragged.run(tree(torch.full((1, 2), 4), torch.tensor([2])), [2])
    ragged.commit(torch.arange(2)[None], torch.tensor([2]), [2], moved=False)
    for piece in texts.split(2, dim=1):
        three = torch.cat([piece, torch.full((1, 2), 4)])
        found = level.run(tree(piece, torch.tensor([2, 2])))
        wanted = ragged.run(tree(three, torch.tensor([2, 2, 2])))
        assert level.cache.window is not None
        assert ragged.cache.window is not None
        assert (level.cache.window.start is None, ragged.cache.window.start is None) == (False, True)
        torch.testing.assert_close(found.logits_BMV, wanted.logits_BMV[:2])
        for rows, count in ((level, 2), (ragged, 3)):
            rows.commit(torch.arange(2).expand(count, -1), torch.full((count,), 2), [2] * count, moved=False)
    assert level.cache.storage is not None
    assert ragged.cache.storage is not None
    torch.testing.assert_close(level.cache.storage[:, :, :, :4], ragged.cache.storage[:, :2, :, :4])


def test_rows_take_memory_as_they_grow(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "FIRST_SLOTS", 6)
    growing, whole = tiny_target_f64.start(2, 40), tiny_target_f64.start(2, 40)
    whole.cache.take_all()
    slots, outputs = [], []
    for rows in (growing, whole):
        for step in range(9):
            tokens_BN = torch.tensor([[7 + step, 9, 11, 13], [50 - step, 20, 30, 40]])
            outputs.append(rows.run(Topology.chain(3).plant(tokens_BN)).logits_BMV)
            rows.commit(torch.arange(4).expand(2, -1), torch.tensor([4, 3]), [4, 3], moved=False)
            assert rows.cache.storage is not None
            slots.append(rows.cache.storage.shape[3])
    assert slots[9:] == [40] * 9
    assert slots[:9] == sorted(slots[:9])
    assert slots[0] == 6
    assert slots[8] == 40
    assert sorted(set(slots[:9])) == [6, 9, 13, 19, 28, 40]
    for found, expected in zip(outputs[:9], outputs[9:], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_memory_that_was_taken_later_keeps_what_was_written(tiny_target_f64: Target) -> None:
    rows = tiny_target_f64.start(1, 700)
    rows.run(Topology.chain(2).plant(torch.tensor([[7, 9, 11]])))
    assert rows.cache.storage is not None
    before = rows.cache.storage[..., :3, :].clone()
    assert rows.cache.storage.shape[3] == kv_cache.FIRST_SLOTS
    rows.cache.take_all()
    assert rows.cache.storage.shape[3] == 700
    assert torch.equal(rows.cache.storage[..., :3, :], before)
    assert not rows.cache.storage[..., 3:, :].any()


def test_a_small_cache_is_one_block() -> None:
    few, many = (RowCache(30, 8, capacity, torch.device("cpu")).blocks for capacity in (1023, 1024))
    assert [block.layers for block in few] == [list(range(30))]
    assert [len(block.layers) for block in many] == [4] * 7 + [2]


def test_layers_of_unlike_shapes_hold_what_they_hold_apart() -> None:
    """Layers 0 and 3 are alike, layer 1 has wider keys than values, layer 2 holds nothing."""
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    mixed, shapes = RowCache(4, 2, 16, cpu, groups=("a", "b", None, "a")), {0: (2, 5, 5), 1: (1, 6, 3), 3: (2, 5, 5)}
    alone = {layer: RowCache(1, 2, 16, cpu) for layer in shapes}
    passes = ((3, [2, 3], [[0, 2, 2], [0, 1, 2]]), (4, [1, 2], [[0, 1], [0, 3]]), (1, [1, 1], [[0], [0]]))
    for size, counts, path in passes:
        held = {}
        for cache in (mixed, *alone.values()):
            cache.open(slice(0, 2), size)
        for layer, (heads, wide, narrow) in shapes.items():
            keys_BHNE = torch.randn(2, heads, size, wide, generator=generator)
            held[layer] = mixed.write(layer, keys_BHNE, keys_BHNE[..., :narrow] + 1)
            wanted = alone[layer].write(0, keys_BHNE, keys_BHNE[..., :narrow] + 1)
            for found, expected in zip(held[layer], wanted, strict=True):
                assert torch.equal(found, expected)
        for cache in (mixed, *alone.values()):
            cache.commit(torch.tensor(path), torch.tensor(counts), counts)
        if size == 4:
            for cache in (mixed, *alone.values()):
                cache.move(1, 0)
                cache.reserve(16, 4)
                cache.take_all()
    assert mixed.shapes == [((2, 5),), ((1, 6), (1, 3)), None, ((2, 5),)]
    assert [block.layers for block in mixed.blocks] == [[0, 3], [1]]


def test_no_more_than_one_block_is_in_memory_twice_while_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MANY_SLOTS", 1)
    cache, layers, slots = RowCache(32, 2, 4096, torch.device("cpu")), 32, (256, 384, 576)
    bytes_of = [2 * layers * 2 * 2 * count * 8 * 4 for count in slots]

    def write(start: int, stop: int) -> None:
        cache.open(slice(0, 2), stop - start)
        for layer in range(layers):
            keys_BHNE = torch.full((2, 2, stop - start, 8), float(layer + start))
            held = cache.write(layer, keys_BHNE, -keys_BHNE)
            assert held[0].shape == (2, 2, stop, 8)
            del held, keys_BHNE
        cache.commit(torch.arange(stop - start).expand(2, -1), torch.tensor([stop - start] * 2), [stop - start] * 2,
                     moved=False)

    with torch.no_grad(), CountedStorages() as count:
        write(0, 256)
        for former, now in pairwise(range(3)):
            count.restart()
            write(slots[former], slots[former] + 1)
            given = 3 * 2 * 2 * 2 * 8 * 4
            assert bytes_of[now] <= count.live <= bytes_of[now] + 4096
            assert count.peak <= bytes_of[now] + bytes_of[former] // 8 + given + 4096
            write(slots[former] + 1, slots[now])
    assert [len(block.layers) for block in cache.blocks] == [4] * 8
    for block in cache.blocks:
        assert block.storage is not None
        for layer in range(4):
            expected = torch.tensor([float(block.layers[layer] + start) for start in (0, 256, 257, 384, 385)])
            found = block.storage[2 * layer, 1, 0, [0, 256, 257, 384, 385], 3]
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["kangaroo", "kangaroo-reduced", "eagle3", "draft-lm", "prompt-tokens"])
def test_every_cache_grows_while_drafting(tiny_target_f64: Target, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = randomised(CASES[name].make(tiny_target_f64))
    requests = [Request((5, 9, 11 + row), row, 24) for row in range(2)]
    answers = []
    monkeypatch.setattr(kv_cache, "MANY_SLOTS", 1)
    for slots, layers in ((256, 4), (1, 4), (1, 1)):
        monkeypatch.setattr(kv_cache, "FIRST_SLOTS", slots)
        monkeypatch.setattr(kv_cache, "FEWEST_LAYERS", layers)
        found = decode(tiny_target_f64, requests, DecodeSettings(batch_size=2, ignore_eos=True), drafter=drafter,
                       policy=Eagle2Tree(9, 3, 3))
        answers.append([one.tokens for one in found.generations])
    assert answers[0] == answers[1] == answers[2]


def test_a_finished_batch_gives_its_memory_back_at_once(tiny_target: Target) -> None:
    gc.collect()
    gc.disable()
    try:
        rows = tiny_target.start(2, 20)
        rows.run(TokenTree.prompts(torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 2])))
        storage = weakref.ref(rows.cache.storage)
        assert storage() is not None
        del rows
        assert storage() is None
    finally:
        gc.enable()
