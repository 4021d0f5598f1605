"""Artifacts that change their target: saving, decoding, drift and export."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftsmith.export import (
    Artifact,
    EvaluateConfig,
    Method,
    Question,
    evaluate,
    export_artifact,
    load_artifact,
    measure_drift,
    read_description,
    save_artifact,
    terminal_table,
)
from draftsmith.modules import DecodeSettings, Request, Target, UserError, decode
from safetensors.torch import load_file
from support.artifacts import TREE, edit, heads
from support.targets import random_adapter, tied_target
from transformers import AutoModelForCausalLM

PROMPTS = [(5, 9, 30), (44, 8), (60, 61, 62, 7, 7)]


def saved(folder: Path, target: Target) -> Path:
    return save_artifact(folder, heads(target), target.identity, {}, TREE, random_adapter(target))


def test_an_adapter_comes_back_with_its_artifact(tmp_path: Path, tiny_target: Target) -> None:
    artifact = load_artifact(saved(tmp_path / "a", tiny_target), tiny_target)
    expected = tiny_target.adapted(random_adapter(tiny_target))
    assert artifact.identity == tiny_target.identity
    assert artifact.target.identity.weights_hash == expected.identity.weights_hash
    requests = [Request(prompt, index, 16) for index, prompt in enumerate(PROMPTS)]
    plain = decode(expected, requests, DecodeSettings()).generations
    drafted = decode(artifact.target, requests, DecodeSettings(batch_size=2), drafter=artifact.drafter,
                     policy=artifact.policy()).generations
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert "It changes the target" in (tmp_path / "a" / "README.md").read_text()
    assert load_artifact(save_artifact(tmp_path / "b", heads(tiny_target), tiny_target.identity, {}, TREE),
                         tiny_target).target is tiny_target


@pytest.mark.long
def test_no_extra_is_needed_to_decode_it(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target)
    code = ("import sys\nfor name in ('peft', 'lightning', 'datasets'): sys.modules[name] = None\n"
            "from pathlib import Path\nfrom draftsmith.export import load_artifact\n"
            "from draftsmith.modules import DecodeSettings, Request, TargetConfig, decode, load_target\n"
            "artifact = load_artifact(Path(sys.argv[1]), load_target(TargetConfig(name='tiny-random')))\n"
            "print(decode(artifact.target, [Request((5, 9, 30), 0, 8)], DecodeSettings(), drafter=artifact.drafter,"
            " policy=artifact.policy()).generations[0].tokens)")
    answer = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    expected = decode(tiny_target.adapted(random_adapter(tiny_target)), [Request((5, 9, 30), 0, 8)], DecodeSettings())
    assert answer.stdout.strip() == str(expected.generations[0].tokens)


def test_an_adapter_that_is_not_described_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    folder = saved(tmp_path / "a", tiny_target)
    edit(folder, adapter=read_description(folder)["adapter"] | {"layers": []})
    with pytest.raises(UserError, match="do not agree about adapter"):
        load_artifact(folder, tiny_target)


def test_drift_equals_that_of_whole_distributions(tiny_target: Target) -> None:
    adapted = tiny_target.adapted(random_adapter(tiny_target, size=0.1))
    found = measure_drift(tiny_target, adapted, PROMPTS, max_new_tokens=12)
    divergence, agreed, tokens = 0.0, 0, 0
    for prompt in PROMPTS:
        with tiny_target.native() as model:
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
            p = model(whole).logits[0, len(prompt) - 1 : -1].softmax(-1)
        with adapted.native() as model:
            q = model(whole).logits[0, len(prompt) - 1 : -1].softmax(-1)
        divergence += float((p * (p.log() - q.log())).sum())
        agreed += int((q.argmax(-1) == whole[0, len(prompt):]).sum())
        tokens += whole.shape[1] - len(prompt)
    assert (found["prompts"], found["tokens"]) == (len(PROMPTS), tokens)
    assert found["kl"] == pytest.approx(divergence / tokens, rel=1e-3)
    assert found["agreement"] == agreed / tokens
    assert 0 < found["agreement"] < 1
    nothing = measure_drift(tiny_target, tiny_target, PROMPTS, max_new_tokens=12)
    assert (nothing["kl"], nothing["agreement"]) == (pytest.approx(0.0, abs=1e-9), 1.0)
    with pytest.raises(UserError, match="no prompt to measure the target's drift on"):
        measure_drift(tiny_target, adapted, [], max_new_tokens=12)


def test_its_row_says_so_and_is_lossless_against_the_adapted_target(tmp_path: Path, tiny_target: Target) -> None:
    artifact = load_artifact(saved(tmp_path / "a", tiny_target), tiny_target)
    questions = {"own": [Question.single(prompt) for prompt in PROMPTS]}
    run = evaluate(artifact.target, [Method.of(artifact)], questions,
                   EvaluateConfig(max_new_tokens=8, speed_prompts=0), progress=False, original=tiny_target)
    assert run.evaluations[0].overall.lossless.identical == len(PROMPTS)
    assert run.header["drift"]["tokens"] > 0
    text = " ".join(terminal_table(run).split())
    assert "medusa (changes the target)" in text
    assert "Changes the target: everything below is measured with the adapted target" in text


@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_model_is_the_adapted_target(tmp_path: Path, tied: bool, tiny_target: Target) -> None:
    target = tied_target() if tied else tiny_target
    adapter = random_adapter(target, ("q_proj", "lm_head"))
    folder = save_artifact(tmp_path / "a", heads(target, output="copy"), target.identity, {}, TREE, adapter)
    artifact = load_artifact(folder, target)
    tokens = torch.tensor([PROMPTS[0]])
    with artifact.target.native() as model, torch.no_grad():
        expected = model(tokens).logits
    for name in ("merged", "medusa"):
        export_artifact(artifact, artifact.target, name, tmp_path / name)
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(tmp_path / name)(tokens).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    stored, own = load_file(tmp_path / "medusa" / "medusa_head.safetensors"), artifact.drafter.state_dict()
    assert torch.equal(stored["medusa_head.1.0.linear.weight"], own["heads.1.0.linear.weight"])
    config = (tmp_path / "medusa" / "config.json").read_text()
    assert '"medusa_num_heads": 3' in config


def test_formats_that_cannot_hold_a_target_are_refused(tmp_path: Path, tiny_target: Target) -> None:
    artifact: Artifact = load_artifact(saved(tmp_path / "a", tiny_target), tiny_target)
    with pytest.raises(UserError, match="changes its target, which the format 'eagle' cannot hold; choose one of"):
        export_artifact(artifact, artifact.target, "eagle", tmp_path / "out")
