"""Prompt tokens in the official layout: recorded outputs, the same tensor after export, refused mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import Artifact, export_artifact, import_drafter
from draftsmith.modules import (
    Features,
    MedusaConfig,
    PromptTokens,
    PromptTokensConfig,
    Target,
    TokenTree,
    Topology,
    UserError,
)
from draftsmith.modules.families.medusa.drafter import Medusa
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import randomised
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURE = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "ppd.safetensors"


def recorded() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """(tensors, configuration of the prompts, that of the target) of the official code."""
    if not FIXTURE.is_file():
        pytest.skip(f"the recorded outputs of the official code are not next to the repository ({FIXTURE.name})")
    with safe_open(FIXTURE, "pt") as file:
        metadata = file.metadata()
    return load_file(FIXTURE), json.loads(metadata["config"]), json.loads(metadata["base_config"])


def official(folder: Path, **changes: Any) -> tuple[Path, Target, dict[str, Tensor]]:
    """(folder in the official layout, the recorded target, all recorded tensors)."""
    tensors, config, base = recorded()
    model = LlamaForCausalLM(LlamaConfig(**base))
    prefix = "weight/base_model."
    model.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()
                           if name.startswith(prefix)})
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file({"prompt_embeddings": tensors["weight/prompt_encoder.default.embedding.weight"]},
              folder / "adapter_model.safetensors")
    return folder, Target(model, tiny_tokenizer(), name="tiny-target"), tensors


def small_target() -> Target:
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2)), tiny_tokenizer(), name="small-target")


def exported(drafter: Any, target: Target, out: Path) -> Path:
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(1), identity=target.identity,
                        provenance={})
    return export_artifact(artifact, target, "ppd", out)


@torch.no_grad()
def test_official_prompts_give_the_recorded_outputs(tmp_path: Path) -> None:
    """Both ways: all positions at once as in training, and virtual nodes of a pass."""
    folder, target, tensors = official(tmp_path / "official")
    drafter = import_drafter("ppd", folder, target)
    tokens_1N = tensors["input/input_ids"]
    features = target.encode(Features.from_rows([(tokens_1N[0].tolist(), [True] * tokens_1N.shape[1])]))
    states_1KD = drafter(features).hidden_BLKD[:, -1]
    expected_1KV = tensors["output/logits"][:, tokens_1N.shape[1] :]
    torch.testing.assert_close(drafter.project(states_1KD, 0), expected_1KV, atol=1e-5, rtol=1e-5)
    tree = TokenTree.prompts(tokens_1N, torch.tensor([tokens_1N.shape[1]]))
    rows = target.start(1, 64)
    sent = drafter.extended(drafter.start(1, 64, rows), tree)
    assert sent.virtual is not None
    last = sent.virtual.anchors_BM[0] == tokens_1N.shape[1] - 1
    assert torch.equal(sent.depths_BN[0, tokens_1N.shape[1] :][last], tensors["output/position_ids"][0, -6:])
    found_1SD = rows.run(sent).final_BND[:, tokens_1N.shape[1] :][:, last]
    torch.testing.assert_close(found_1SD, tensors["output/hidden_states_all"][:, -6:], atol=1e-5, rtol=1e-5)
    seen = sent.ancestors_BNN[:, tokens_1N.shape[1] :][:, last]
    ours = torch.cat([seen[..., : tokens_1N.shape[1]], seen[..., tokens_1N.shape[1] :][..., last]], dim=-1)
    assert torch.equal(ours, tensors["output/attention_allowed"][:, 0, -6:])


def test_official_prompts_come_back_as_they_were(tmp_path: Path) -> None:
    folder, target, tensors = official(tmp_path / "official")
    again = exported(import_drafter("ppd", folder, target), target, tmp_path / "again")
    found = load_file(again / "adapter_model.safetensors")
    assert found.keys() == {"prompt_embeddings"}
    assert torch.equal(found["prompt_embeddings"], tensors["weight/prompt_encoder.default.embedding.weight"])
    config = json.loads((again / "adapter_config.json").read_text())
    recorded_config = json.loads((folder / "adapter_config.json").read_text())
    assert {name: config[name] for name in recorded_config} == recorded_config
    assert (config["token_dim"], config["base_model_name_or_path"]) == (32, "tiny-target")


def test_a_reduced_vocabulary_is_made_whole(tmp_path: Path) -> None:
    target = small_target()
    config = PromptTokensConfig(num_tokens=2, vocabulary_size=4)
    drafter = randomised(PromptTokens.create(config, target, torch.tensor([1, 5, 9, 30])))
    again = import_drafter("ppd", exported(drafter, target, tmp_path / "out"), target)
    assert (again.config.num_tokens, again.config.copies, again.token_ids_Q) == (2, 1, None)
    assert torch.equal(again.prompts, drafter.prompts)


@pytest.mark.parametrize(("changes", "words"), [
    ({"vt_attention_type": "decoder"}, 'vt_attention_type: "decoder"; only "ensemble" can be imported'),
    ({"aggregation_type": "weighted"}, 'aggregation_type: "weighted"; only "mean"'),
    ({"use_prefix_tuning": True}, "use_prefix_tuning: true; only false"),
    ({"num_special_tokens": "3"}, "must hold num_special_tokens and .* at least 1, got 3 and 2"),
    ({"num_special_tokens": 4}, "the prompt_tokens drafter in .* does not fit .* tiny-target"),
])
def test_settings_without_a_counterpart_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder, target, _ = official(tmp_path / "official", **changes)
    with pytest.raises(UserError, match=words):
        import_drafter("ppd", folder, target)


def test_another_family_is_refused(tmp_path: Path) -> None:
    target = small_target()
    with pytest.raises(UserError, match="the format ppd holds prompt tokens, this artifact is medusa"):
        exported(Medusa.create(MedusaConfig(num_heads=1), target), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
