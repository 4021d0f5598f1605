"""A target that several processes hold computes and trains what a whole one does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import load_target
from draftsmith.modules.target.loading.loading import TargetConfig
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.trainers import FitResult
from references.placed_target import Found, show, train
from support.processes import torchrun
from transformers import MistralConfig, MistralForCausalLM

SCRIPT = Path(__file__).resolve().parents[1] / "references" / "placed_target.py"
BOUND = 2e-5  # Largest difference of two states of size 1 in float32: the products of a layer sum in another order


@dataclass(frozen=True)
class Case:
    """A divided target, and what the same target computes and trains in one process."""

    placement: str
    offload: bool
    strategy: str
    processes: int
    folder: Path
    found: Found
    result: FitResult
    checkpoint: dict[str, Any]


@pytest.fixture(scope="module", params=[
    ("fully_sharded", "ddp", 2, True), ("tensor_parallel", "ddp", 4, False),
    ("zero3", "deepspeed_stage_3", 2, False),
    ("zero3 offload", "ddp", 2, True),
], ids=lambda given: "-".join(given[:2]))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A random model, its output layer tied to the embedding or not, with a sliding window: the check at load then
    reads an excerpt of it."""
    named, strategy, processes, tied = request.param
    placement, *offload = named.split()
    folder, out = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("alone")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = MistralForCausalLM(MistralConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=16, max_position_embeddings=256,
            initializer_range=0.2, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    target = load_target(TargetConfig(name=str(folder), device="cpu", pack=0))
    result = train(target, out, world=1)
    return Case(placement, bool(offload), strategy, processes, folder, show(target, list(range(processes))), result,
                checkpoint(out))


def checkpoint(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / "last.ckpt", weights_only=True)
    return found


@pytest.mark.long
@pytest.mark.distributed
def test_a_divided_target_is_the_whole_one(case: Case, tmp_path: Path) -> None:
    """Each process reads rows of its own, of other shapes. Two processes hold a target: four of them hold two."""
    answer = torchrun(case.processes, str(SCRIPT), str(case.folder), case.placement, "2",
                      "offload" if case.offload else "keep", case.strategy, str(tmp_path))
    assert answer.returncode == 0, answer.stderr[-4000:]
    alone = case.found
    assert max(max(passes) for passes in alone.emitted) > 1, "no draft is accepted: nothing would be compared"
    for rank in range(case.processes):
        one = torch.load(tmp_path / f"process{rank}.pt", weights_only=True)
        for state, expected in zip(one["states"][rank], alone.states[rank], strict=True):
            torch.testing.assert_close(state, expected, atol=BOUND, rtol=BOUND)
        torch.testing.assert_close(one["sums"][rank], alone.sums[rank], atol=1e-4, rtol=1e-4)
        assert (one["answers"], one["emitted"]) == (alone.answers, alone.emitted)
        assert one["layer_bytes"] <= 0.55 * alone.layer_bytes
        assert (one["weights_hash"], one["architecture"]) == (alone.weights_hash, alone.architecture)
        assert (one["step"], one["accepted_length"], one["by_position"]) == (
            case.result.step, case.result.accepted_length, case.result.by_position)
    stored = checkpoint(tmp_path)
    assert stored["global_step"] == case.checkpoint["global_step"] == 4
    assert stored["state_dict"].keys() == case.checkpoint["state_dict"].keys()
    for name, tensor in case.checkpoint["state_dict"].items():
        torch.testing.assert_close(stored["state_dict"][name], tensor, atol=2e-4, rtol=1e-3)
