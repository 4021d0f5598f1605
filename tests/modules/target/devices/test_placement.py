"""Placements of a target: what they refuse before a weight is read, and which device each layer goes to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import DecodeSettings, Features, Request, UserError, decode, load_target, processes
from draftsmith.modules.processes import Processes
from draftsmith.modules.target.devices.placement import PLACEMENTS, device_map, placement_named
from draftsmith.modules.target.kv_cache import RowCache
from draftsmith.modules.target.loading import loading
from draftsmith.modules.target.loading.loading import TargetConfig, sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.answers import native_greedy
from support.targets import random_target, random_trait
from transformers import GPT2Config, GPT2LMHeadModel

CPU, META = torch.device("cpu"), torch.device("meta")


def launch(monkeypatch: pytest.MonkeyPatch, world: int, rank: int = 0) -> None:
    """Let this process look like one of those that torchrun has started."""
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("placement", "degree", "world", "message"), [
    ("tensor_parallel", None, 1, r"target\.placement tensor_parallel shares one target among several processes, but "
     r"this is one; start draftsmith train with torchrun --nproc-per-node, or with --target\.placement layers"),
    ("fully_sharded", 3, 8, r"target\.degree 3 does not divide the 8 processes .* set it to a divisor of 8, such as 2"),
    ("fully_sharded", 1, 8, r"target\.degree 1 does not divide the 8 processes of this run into groups of at least 2"),
    ("tensor_parallel", 4, 8, r"target\.degree 4 does not divide num_key_value_heads 2 of the target; .*fully_sharded"),
    ("tensor_parallel", 8, 8, r"target\.degree 8 does not divide num_attention_heads 4 of the target"),
    ("tensor_parallel", 0, 8, r"target\.degree must be at least 1, got 0; leave it out"),
    ("pipeline", None, 1, r"placement must be replicated, tensor_parallel, fully_sharded, zero3, layers, disk, got "
     r"'pipeline'"),
    ("zero3", None, 1, r"target\.placement zero3 shares one target among several processes, but this is one; start"),
    ("zero3", 2, 8, r"zero3 divides the target among all 8 processes, but target\.degree is 2; leave it out, or set"),
])
def test_processes_that_cannot_share_a_target_are_refused_before_it_is_read(
    placement: Any, degree: int | None, world: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, world)
    with pytest.raises(UserError, match=message):
        load_target(TargetConfig(name="tiny-random", device="cpu", placement=placement, degree=degree))


def test_targets_that_cannot_be_divided_are_refused() -> None:
    sketch = tiny_model()
    divided = [placement_named(name, None) for name in ("tensor_parallel", "fully_sharded", "zero3")]
    for placement in divided:
        with pytest.raises(UserError, match=r"a GGUF file is dequantised as a whole .* save the model as a Hugging"):
            placement.require_fit(sketch, 2, gguf=True)
    sketch.quantised_as = "fp8"
    for placement in [*divided, placement_named("layers", None)]:
        with pytest.raises(UserError, match=r"weights are quantised \(fp8\), and target\.placement \w+ s.*unquantised"):
            placement.require_fit(sketch, 2, gguf=False)
    without_plan = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20))
    with pytest.raises(UserError, match=r"no plan by which GPT2LMHeadModel is divided .* fully_sharded"):
        divided[0].require_fit(without_plan, 2, gguf=False)


@pytest.mark.parametrize("placement", ["tensor_parallel", "fully_sharded", "zero3", "layers"])
def test_layers_that_are_not_whole_are_not_packed(placement: Any) -> None:
    with pytest.raises(UserError, match=rf"target\.pack 1 packs whole linear .* {placement} does not keep .* auto"):
        sketch_target(TargetConfig(name="tiny-random", placement=placement, pack=1))
    assert placement_named(placement, None).pack("auto") == 0
    assert placement_named("replicated", None).pack("auto") == "auto"


def test_zero3_needs_deepspeed_and_a_number_format_that_it_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = placement_named("zero3", None)
    with pytest.raises(UserError, match=r"dtype float64 is not divided by DeepSpeed; set target\.dtype: float32"):
        placement.require_fit(tiny_model(dtype=torch.float64), 2, gguf=False)
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"target\.placement zero3 needs DeepSpeed, which is not installed; run pip "
                                        r"install 'draftsmith\[deepspeed\]', or set target\.placement: fully_sharded"):
        placement.require_fit(tiny_model(), 2, gguf=False)


@pytest.mark.parametrize("name", ["replicated", "fully_sharded", "layers"])
def test_only_zero3_keeps_weights_in_the_memory_of_the_machine(name: str) -> None:
    with pytest.raises(UserError, match=rf"target\.offload keeps .* zero3 only, and the placement is {name}; set"):
        placement_named(name, None, offload=True)


def test_a_target_is_spread_over_devices_only_where_there_are_some() -> None:
    with pytest.raises(UserError, match=r"spreads the target over the devices of one process, but there are 0 here"):
        load_target(TargetConfig(name="tiny-random", device="cpu", placement="layers"))
    with pytest.raises(UserError, match=r"over all devices of one process, but 2 processes train; set train\.devices"):
        placement_named("layers", None).require_processes(2)


def test_a_spread_target_is_not_copied_or_moved() -> None:
    target = sketch_target(TargetConfig(name="tiny-random", placement="fully_sharded"))
    with pytest.raises(UserError, match=r"needs its layers whole on one device, and target\.placement is fully"):
        target.copy_model()
    assert target.to("cpu").device == META


@pytest.mark.parametrize("kind", ["plain", "joined experts"])
def test_layers_on_disk_are_read_when_they_run(tmp_path: Path, kind: str) -> None:
    (tiny_model() if kind == "plain" else random_trait("deepseek-v3", torch.float32)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole, there = (load_target(TargetConfig(name=str(tmp_path), device="cpu", placement=name))
                    for name in ("replicated", "disk"))
    assert {weight.device for weight in there.layers.parameters()} == {META}
    assert (there.device, there.identity) == (CPU, whole.identity)
    text = Features.from_rows([([5, 9, 33, 71], [True] * 4)])
    found, expected = (target.encode(text, (0, 1)) for target in (there, whole))
    torch.testing.assert_close(found.final(), expected.final(), rtol=0, atol=0)
    torch.testing.assert_close(found.taps, expected.taps, rtol=0, atol=0)
    [answer] = decode(there, [Request((5, 9, 33), 0, 6)], DecodeSettings()).generations
    assert answer.tokens == native_greedy(whole, (5, 9, 33), 6)
    with pytest.raises(UserError, match=r"needs its layers whole on one device, and target\.placement is disk"):
        there.copy_model()
    with pytest.raises(UserError, match=r"placement disk leaves layers in their files, and tiny-random has none; give"):
        load_target(TargetConfig(name="tiny-random", placement="disk"))


@pytest.mark.parametrize(("layers", "count", "expected"), [
    (6, 3, [0, 0, 1, 1, 2, 2]), (7, 3, [0, 0, 1, 1, 2, 2, 2]), (8, 3, [0, 0, 1, 1, 1, 2, 2, 2]), (2, 3, [1, 2]),
])
def test_layers_go_to_devices_in_blocks_and_the_rest_to_the_first(layers: int, count: int, expected: list[int]) -> None:
    model, devices = random_target(layers).model, [torch.device("cuda", number) for number in range(count)]
    found = device_map(model, devices)
    assert [found[f"model.layers.{layer}"].index for layer in range(layers)] == expected
    assert {found[name].index for name in found if ".layers." not in name} == {0}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        assert sum(name == part or name.startswith(f"{part}.") for part in found) == 1, name


def test_keys_and_values_stay_on_the_device_of_their_layer() -> None:
    """Shapes and devices alone: the later layers have no values here."""
    cache = RowCache(3, 2, 8, CPU, [CPU, META, META])
    window = cache.open(slice(0, 2), 3)
    cache.lengths_B += torch.tensor([0, 0])
    for layer, device in enumerate((CPU, META, META)):
        keys_BHNE = torch.ones(2, 1, 3, 4, device=device)
        held = cache.write(layer, keys_BHNE, 2 * keys_BHNE)
        assert [tensor.device for tensor in held] == [device] * 2
        assert [tuple(tensor.shape) for tensor in held] == [(2, 1, 3, 4)] * 2
    assert [block.layers for block in cache.blocks] == [[0], [1, 2]]
    shapes = [(block.storage.device, len(block.storage)) for block in cache.blocks if block.storage is not None]
    assert shapes == [(CPU, 2), (META, 4)]
    assert window.on(META).slots_BN.device == META
    assert window.on(META) is window.on(META), "the indices are copied once a pass"
    cache.commit(torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 2]), [2, 2])
    cache.reserve(16, 4)
    cache.take_all()
    cache.wipe(0)
    cache.copy(1, 0, 2)
    assert {block.storage.shape[3] for block in cache.blocks if block.storage is not None} == {25}
    assert cache.host_lengths == [2, 2]


def test_layers_in_several_blocks_hold_what_they_hold_in_one() -> None:
    """Two blocks of one device, as if there were two devices."""
    generator = torch.Generator().manual_seed(0)
    whole, split = RowCache(4, 2, 16, CPU), RowCache(4, 2, 16, CPU, [CPU, CPU, torch.device("cpu", 0), CPU])
    assert [[block.layers for block in cache.blocks] for cache in (whole, split)] == [[[0, 1, 2, 3]], [[0, 1, 3], [2]]]
    for size, counts in ((3, [2, 3]), (4, [1, 2])):
        path = torch.tensor([[0, 2, 2], [0, 1, 2]]) if size == 3 else torch.tensor([[0, 1], [0, 3]])
        states = [torch.randn(2, 2, size, 5, generator=generator) for _ in range(4)]
        for cache in (whole, split):
            cache.open(slice(0, 2), size)
            for layer, keys_BHNE in enumerate(states):
                cache.write(layer, keys_BHNE, -keys_BHNE)
            cache.commit(path, torch.tensor(counts), counts)
    for cache in (whole, split):
        cache.open([1, 0], 2, gap=1)
        cache.arrange(3, torch.tensor([[1, 0], [0, 1]]))
        cache.move(1, 0)
    parts = [block.storage for block in split.blocks if block.storage is not None]
    assert whole.storage is not None
    assert torch.equal(torch.cat(parts), whole.storage[[0, 1, 2, 3, 6, 7, 4, 5]])


@pytest.mark.parametrize(("name", "local_rank", "expected"), [
    ("cuda", "3", "cuda:3"), ("auto", "3", "cuda:3"), ("cuda:1", "3", "cuda:1"), ("cuda", None, "cuda"),
])
def test_each_process_loads_onto_its_own_device(name: str, local_rank: str | None, expected: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are not here: only their choice is."""
    monkeypatch.setattr(loading.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading.torch, "empty", lambda *_args, **_kwargs: None)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert loading.device_named(name) == torch.device(expected)


def test_items_are_dealt_in_pairs_and_none_is_lost() -> None:
    processes = [Processes(rank=rank, world=3) for rank in range(3)]
    shares = [one.share(range(9), together=2) for one in processes]
    assert shares == [[0, 1, 6, 7], [2, 3, 8], [4, 5]]
    assert {one.largest_share(9, together=2) for one in processes} == {4}
    assert Processes().share(range(3), together=2) == [0, 1, 2]


def test_processes_of_torchrun_are_known_before_they_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert Processes.launched() == Processes(), "a variable of somebody else"
    launch(monkeypatch, 8, 5)
    assert Processes.launched() == Processes(rank=5, world=8)
    assert Processes.grouped().gather("alone") == ["alone"]


def test_alone_every_placement_reads_its_own_rows_as_they_are() -> None:
    features = Features.from_rows([([1, 2], [True, True])])
    for kind in PLACEMENTS:
        if kind.name != "tensor_parallel":
            assert kind().own_states(lambda batch: batch, features) is features
