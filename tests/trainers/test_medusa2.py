"""Medusa-2: the joint loss, trained weights in each stage, resuming, and decoding with a changed target."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftsmith.export.report.family_comparison import markdown, read_standing
from draftsmith.modules import MedusaConfig, Target, answered_anew, ranked_text
from draftsmith.modules.target.adapter import choose_layers
from draftsmith.modules.target.loading.model_parts import hash_weights
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.trainers import FitResult, Medusa2Module, Medusa2TrainConfig, fit, medusa2
from draftsmith.trainers.medusa2 import LearningTarget, LoraConfig
from families.medusa.reference import joint_loss
from safetensors.torch import load_file
from support.cases import CYCLE, CycleData, cycle_rows, cycle_target, interrupted
from support.targets import recurrent_model
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:validation decodes only", "ignore:.*is_gradient_checkpointing",
                                        "ignore:.*tie_word_embeddings")
SMALL = Medusa2TrainConfig(max_steps=8, lr=5e-3, warmup_steps=1, validate_every=4, validation_nodes=4,
                           checkpoint_every=2, drafter=MedusaConfig(num_heads=2), precision="32-true",
                           accelerator="cpu", lora=LoraConfig(rank=4))


@pytest.fixture(autouse=True)
def without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are compared with those of plain twins, which draw no random numbers."""
    monkeypatch.setattr(medusa2, "DROPOUT", 0.0)


def config(**changes: Any) -> Medusa2TrainConfig:
    return dataclasses.replace(SMALL, **changes)


def train(target: Target, out: Path, settings: Medusa2TrainConfig = SMALL,
          kind: type[Medusa2Module] = Medusa2Module) -> tuple[Medusa2Module, FitResult]:
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    counts[list(CYCLE)] = 5
    module = kind(target, settings, token_counts=counts)
    return module, fit(module, CycleData(), out, progress=False)


def changed(module: Medusa2Module, size: float = 0.05) -> Medusa2Module:
    """A built module whose target is no longer the original."""
    module.configure_model()
    with torch.no_grad():
        for weight in module.learning.b:
            weight += size * torch.randn_like(weight)
    return module


@pytest.fixture(scope="module")
def target() -> Target:
    return cycle_target()


def at(module: Medusa2Module, progress: float) -> Medusa2Module:
    """The module after the given share of its steps."""
    kind = type("Placed", (type(module),), {"global_step": int(progress * module.config.max_steps)})
    module.__class__ = kind
    return module


@pytest.mark.parametrize(("settings", "progress", "expected"), [
    ({}, 0.0, (0.0, 1.0, 0.8)), ({}, 0.49, (0.0, 1.0, 0.8)), ({}, 0.5, (1.0, 0.2, 0.16)), ({}, 0.99, (1.0, 0.2, 0.16)),
    ({"schedule": "sine"}, 0.0, (1.0, 0.0, 0.0)), ({"schedule": "sine"}, 0.5, (1.0, 0.01 * 0.5**0.5, 0.008 * 0.5**0.5)),
    ({"schedule": "sine"}, 1.0, (1.0, 0.01, 0.008)),
])
def test_the_weights_follow_the_schedule(
    settings: dict[str, Any], progress: float, expected: tuple[float, ...], target: Target
) -> None:
    module = at(Medusa2Module(target, config(max_steps=100, **settings)), progress)
    assert module.weights(3) == pytest.approx(expected)


def rates(module: Medusa2Module) -> list[tuple[float, ...]]:
    """(low-rank, heads' matrices, heads' vectors) of each step."""
    module.configure_model()
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]  # type: ignore[index]
    found = []
    for _ in range(module.config.max_steps):
        found.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        scheduler.step()
    return found


def test_two_learning_rates_and_a_warm_up_in_each_stage(target: Target) -> None:
    found = rates(Medusa2Module(target, config(max_steps=20, warmup_steps=2, lr=1.0)))
    low_rank, heads, vectors = zip(*found, strict=True)
    assert heads == vectors
    assert low_rank[:10] == (0.0,) * 10
    assert 0 < heads[0] < heads[1] > heads[2] > heads[9]
    assert heads[9] < 0.1
    assert all(4 * low == pytest.approx(head) for low, head in zip(low_rank[10:], heads[10:], strict=True))
    assert 0 < low_rank[10] < low_rank[11] > low_rank[12] > low_rank[19]
    single = rates(Medusa2Module(target, config(max_steps=20, warmup_steps=2, lr=1.0, schedule="sine")))
    assert all(low > 0 and 4 * low == pytest.approx(head) for low, head, _ in single[:-1])


def test_a_run_that_ends_by_time_warms_up_over_as_many_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of the rise are counted although the run ends long before the last one."""
    module = Medusa2Module(target, config(max_steps=10**6, max_minutes=1.0, warmup_steps=4, lr=1.0, schedule="sine"))
    found = []
    for step in range(50):
        module.seconds = 60 * step / 100
        monkeypatch.setattr(Medusa2Module, "global_step", step)
        found.append(module._rate(step, [(0.0, 1.0)]))
    assert found[:3] == pytest.approx([0.25, 0.5, 0.75], rel=0.02)
    assert found[4] == pytest.approx(1.0, rel=0.02)
    assert found[49] == pytest.approx(0.5, abs=0.03)


def test_a_drafts_text_is_not_a_label_of_the_target(target: Target) -> None:
    for objective, learns in (("hard", True), ("soft", False)):
        assert Medusa2Module(target, config(objective=objective)).needs_teacher is not learns


@pytest.mark.parametrize("shape", [{}, {"output": "copy"}, {"output": "one_copy"}, {"vocabulary_size": 20}])
def test_the_joint_loss_is_the_plain_one(
    shape: dict[str, Any], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Total, count and every gradient, against whole logits one token at a time."""
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    counts[list(CYCLE)] = 5
    monkeypatch.setitem(medusa2.HEADS_WEIGHT, "sine", 0.7)
    settings = config(schedule="sine", drafter=MedusaConfig(num_heads=2, **shape))
    module = at(changed(Medusa2Module(target, settings, token_counts=counts)), 0.5)
    features = cycle_rows(3)
    learned = module.loss(features)
    learned.total.backward()
    found = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    slow = joint_loss(module, features, module.weights(3))
    slow.backward()
    torch.testing.assert_close(learned.total, slow)
    for gradient, weight in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, atol=1e-5, rtol=1e-4)
        assert gradient.abs().max() > 0


def test_at_the_start_the_target_agrees_with_itself(target: Target) -> None:
    """B is zero: KL and its gradient are zero, the acceptance is one, and the stored held-out answers are used."""
    module = at(Medusa2Module(target, config(schedule="sine", max_steps=10)), 0.0)
    module.configure_model()
    learned = module.loss(cycle_rows(1))
    figures = module.describe(learned.sums_KC, learned.weights, learned.offsets)
    assert figures["language/alpha"] == pytest.approx(1.0, abs=1e-6)
    logits = target.logits(target.encode(cycle_rows(1)).final())
    _, valid = cycle_rows(1).labels(1)
    entropy = torch.distributions.Categorical(logits=logits[valid]).entropy().mean()
    assert figures["language/loss"] == pytest.approx(float(entropy), abs=1e-5)
    learned.total.backward()
    assert all(weight.grad.abs().max() < 1e-4 for weight in module.learning.parameters())
    rows = [target.encode(cycle_rows(number, rows=1)) for number in range(3)]
    assert module.verifier(rows) == (target, rows)
    assert not changed(module).learning.unchanged
    assert module.verifier(rows)[0] is not target


def test_each_stage_trains_its_own_weights(target: Target, tmp_path: Path) -> None:
    class Watched(Medusa2Module):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            seen.append((self.learning.unchanged, self.drafter.heads[0][0].linear.bias.detach().clone()))

    seen: list[tuple[bool, Tensor]] = []
    before = hash_weights(target.model)
    outputs = target.encode(cycle_rows(5)).final()
    train(target, tmp_path, kind=Watched)
    assert [unchanged for unchanged, _ in seen] == [True] * 4 + [False] * 4
    assert all(not torch.equal(a, b) for (_, a), (_, b) in itertools.pairwise(seen))
    assert hash_weights(target.model) == before
    assert torch.equal(target.encode(cycle_rows(5)).final(), outputs)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.model.parameters())


def test_an_interrupted_run_ends_in_the_same_bits(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low-rank weights are in both files, dropout is on, and each stage has one interruption."""
    monkeypatch.setattr(medusa2, "DROPOUT", 0.2)
    settings = config(accumulate=2)
    _, whole = train(target, tmp_path / "whole", settings)
    for at in (5, 13):
        with interrupted(Medusa2Module, at):
            train(target, tmp_path / "parts", settings)
    module, parts = train(target, tmp_path / "parts", settings)
    expected, found = (torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"]
                       for name in ("whole", "parts"))
    assert expected.keys() == found.keys()
    assert sum(name.startswith("learning.") for name in expected) == 2 * len(module.learning.names)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert parts.checkpoint.read_bytes() == whole.checkpoint.read_bytes()
    kept = load_file(parts.checkpoint)
    assert kept.keys() == module.trained().keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.trained().items())
    assert sum(name.startswith("adapter.") for name in kept) == 2 * len(module.learning.names)


def test_answers_written_anew_are_the_adapted_targets_own(target: Target) -> None:
    """Replaying drafts on them is exact: accepted lengths equal those of real decoding."""
    module = changed(Medusa2Module(target, config()), size=0.3)
    adapted = target.adapted(module.adapter)
    stored = [target.encode(cycle_rows(number, rows=1)) for number in range(3)]
    rows = answered_anew(adapted, stored)
    for before, after in zip(stored, rows, strict=True):
        start = int(before.supervised_BL[0].long().argmax())
        with adapted.native() as model:
            room = before.tokens_BL.shape[1] - start
            whole = model.generate(before.tokens_BL[:, :start], max_new_tokens=room, do_sample=False)[0]
        assert after.tokens_BL[0].tolist() == whole.tolist()
        assert after.supervised_BL[0].tolist() == [False] * start + [True] * (len(whole) - start)
        torch.testing.assert_close(after.final(), adapted.encode(after).final())


@pytest.mark.long
def test_the_heads_learn_and_the_target_stays_itself(target: Target, tmp_path: Path) -> None:
    """Trained on a deterministic text that the target did not write: the heads learn it, KL keeps the target."""
    settings = config(max_steps=120, lr=1e-2, warmup_steps=5, validate_every=120, checkpoint_every=120,
                      drafter=MedusaConfig(num_heads=2, output="copy"))
    module, _ = train(target, tmp_path, settings)
    # The last weights, not the best ones, which may be from before the second stage.
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    module.load_state_dict(stored)
    adapted, features = target.adapted(module.adapter), cycle_rows(77, rows=8)
    _, valid = features.labels(1)
    before, after = (one.logits(one.encode(features).final())[valid].log_softmax(-1) for one in (target, adapted))
    assert not module.learning.unchanged
    assert float(torch.nn.functional.kl_div(after, before, log_target=True, reduction="batchmean")) < 0.05
    assert float((ranked_text(module.drafter, [adapted.encode(features)]).ranks_PK[:, 0] == 0).float().mean()) > 0.9


# A whole run ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_a_run_from_prompts_to_the_report_tells_how_far_the_target_moved(tmp_path: Path) -> None:
    from draftsmith.recipes.__main__ import main

    tiny = Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml"
    recipe = yaml.safe_load(tiny.read_text())
    recipe["family"], recipe["drafter"] = "medusa2", {"num_heads": 2}
    recipe["train"] = {"max_steps": 12, "lr": 2e-2, "warmup_steps": 1, "validate_every": 6, "checkpoint_every": 6,
                       "validation_nodes": 4, "lora": {"rank": 2}}
    recipe["batch"]["states"] = "computed"
    recipe["evaluate"] = {"max_new_tokens": 12, "speed_prompts": 1, "limit": 3, "temperatures": [0.0, 1.0]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    out = tmp_path / "out"
    assert main(["run", "--config", str(tmp_path / "recipe.yaml"), "--out", str(out)]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert found["method"] == "medusa (changes the target)"
    for record in found["measurements"]:
        assert record["lossless"]["identical"] + record["lossless"]["near_tie_divergences"] == record["prompts"]
    drift = found["header"]["drift"]
    assert 0 <= drift["agreement"] <= 1
    assert drift["kl"] >= 0
    assert "changes the target" in (out / "report.md").read_text()
    standing = read_standing("medusa2", out)
    assert standing is not None
    assert standing["changes_target"]
    assert standing["drift_agreement"] == drift["agreement"]
    assert "medusa2 (changes the target)" in markdown([standing])
    assert main(["generate", "--artifact", str(out / "artifact"), "--prompt", "hello", "--max_new_tokens", "4"]) == 0
    merged = out / "merged"
    assert main(["export", "--artifact", str(out / "artifact"), "--format", "merged", "--out", str(merged)]) == 0
    assert (merged / "config.json").is_file()


@pytest.mark.parametrize("family", ["NemotronH", "Qwen3Next"])
def test_all_linear_layers_of_a_hybrid_learn_and_nothing_else(family: str) -> None:
    """peft alone would refuse the layers of Mamba and change the experts too."""
    target = Target(recurrent_model(family), tiny_tokenizer(), name=family)
    learning = LearningTarget(target, LoraConfig(rank=2))
    assert list(learning.names) == choose_layers(target.model, (), without=target.head)
    changed = {name.partition(".lora_")[0] for name, _ in learning.target.model.named_parameters() if ".lora_" in name}
    assert changed == set(learning.names)
