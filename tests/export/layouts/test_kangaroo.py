"""A Kangaroo adapter in the official layout: recorded outputs, the same names after export, refused mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import Artifact, ImportSettings, export_artifact, import_drafter
from draftsmith.modules import Drafter, Features, Kangaroo, KangarooConfig, MedusaConfig, Target, Topology, UserError
from draftsmith.modules.families.medusa.drafter import Medusa
from draftsmith.modules.interfaces.proposer import Frontier
from draftsmith.modules.parts.block_cache import BlockRows
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import randomised
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURE = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "kangaroo.safetensors"


def recorded() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, config.json) of the official code."""
    if not FIXTURE.is_file():
        pytest.skip(f"the recorded outputs of the official code are not next to the repository ({FIXTURE.name})")
    with safe_open(FIXTURE, "pt") as file:
        return load_file(FIXTURE), json.loads(file.metadata()["config"])


def small_target(head_VD: Tensor | None = None) -> Target:
    """A tiny target of the recorded width, with the recorded output layer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
                                         pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64))
    if head_VD is not None:
        with torch.no_grad():
            model.lm_head.weight.copy_(head_VD)
    return Target(model, tiny_tokenizer(), name="tiny-target")


def official(folder: Path, **changes: Any) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """(folder in the official layout, its weights, all recorded tensors)."""
    tensors, config = recorded()
    weights = {key.removeprefix("weight/"): value for key, value in tensors.items() if key.startswith("weight/")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, folder / "model.safetensors")
    return folder, weights, tensors


def exported(drafter: Drafter, target: Target, out: Path) -> Path:
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(1), identity=target.identity,
                        provenance={})
    return export_artifact(artifact, target, "kangaroo", out)


@torch.no_grad()
def test_an_official_adapter_gives_the_recorded_outputs(tmp_path: Path) -> None:
    folder, _, tensors = official(tmp_path / "official")
    target = small_target(tensors["input/target_lm_head"])
    drafter = import_drafter("kangaroo", folder, target, ImportSettings(exit_layer=2))
    exits = tensors["input/exit_hidden"]
    rows = Features.from_rows([(list(range(3, 11)), [True] * 8)])
    drafts = drafter(Features(**{**vars(rows), "taps": {1: exits}}))
    torch.testing.assert_close(drafts.hidden_BLKD[:, :, 0], tensors["output/hidden_8_uncached"], atol=1e-5, rtol=1e-5)
    cached = BlockRows(1, 1, 16, exits.device)
    found = drafter.adapt(exits[:, :6], cached.read([0], 6))
    cached.commit(torch.tensor([6]), [6])
    torch.testing.assert_close(found, tensors["output/hidden"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drafter.project(found, 0), tensors["output/logits"], atol=1e-5, rtol=1e-5)
    for node in range(2):
        here = torch.tensor([[node]])
        context = cached.add_nodes(Frontier(nodes_BF=here, parents_BF=here - 1, tokens_BF=here))
        step = drafter.adapt(exits[:, 6 + node : 7 + node], context)
        torch.testing.assert_close(step[:, 0], tensors["output/step_hidden"][:, node], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(drafter.project(step, 0)[:, 0], tensors["output/step_logits"][:, node],
                                   atol=1e-5, rtol=1e-5)


def test_an_official_adapter_comes_back_as_it_was(tmp_path: Path) -> None:
    folder, weights, tensors = official(tmp_path / "official")
    target = small_target(tensors["input/target_lm_head"])
    drafter = import_drafter("kangaroo", folder, target, ImportSettings(exit_layer=2))
    again = exported(drafter, target, tmp_path / "again")
    found = load_file(again / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    config = json.loads((again / "config.json").read_text())
    own = {"draftsmith_exit_layer": 2, "draftsmith_gamma": 6, "draftsmith_eta": 0.6}
    assert config == json.loads((folder / "config.json").read_text()) | own
    assert "--exitlayer 2 --threshold 0.6 --steps 6" in (again / "README.md").read_text()


def test_exit_gamma_and_eta_come_back_with_a_reduced_vocabulary_made_whole(tmp_path: Path) -> None:
    target = small_target()
    config = KangarooConfig(exit_layer=2, gamma=3, eta=0.25, vocabulary_size=4)
    drafter = randomised(Kangaroo.create(config, target, torch.tensor([1, 5, 9, 30])))
    again = import_drafter("kangaroo", exported(drafter, target, tmp_path / "out"), target)
    assert again.config == KangarooConfig(exit_layer=2, gamma=3, eta=0.25)
    own = drafter.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in again.state_dict().items())
    assert own.keys() - again.state_dict().keys() == {"token_ids"}


def test_a_layout_without_an_exit_layer_asks_for_it(tmp_path: Path) -> None:
    folder, _, tensors = official(tmp_path / "official")
    with pytest.raises(UserError, match=r"after which layer .* the adapter comes; give it with --exit_layer"):
        import_drafter("kangaroo", folder, small_target(tensors["input/target_lm_head"]))


def test_an_adapter_for_another_target_is_refused(tmp_path: Path) -> None:
    folder, weights, tensors = official(tmp_path / "official", draftsmith_exit_layer=3)
    target = small_target(tensors["input/target_lm_head"])
    with pytest.raises(UserError, match="exit_layer must be below the 3 layers of tiny-target, got 3"):
        import_drafter("kangaroo", folder, target)
    save_file({**weights, "norm.weight": torch.ones(31)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"the kangaroo drafter in .* does not fit .* tiny-target"):
        import_drafter("kangaroo", folder, target, ImportSettings(exit_layer=1))


def test_what_the_official_code_cannot_run_is_refused(tmp_path: Path) -> None:
    target = small_target()
    turned = Kangaroo.create(KangarooConfig(rope_base=5e5), target)
    with pytest.raises(UserError, match="rotates with the base 10000, this adapter with 500000; train with rope_base"):
        exported(turned, target, tmp_path / "out")
    wide = Kangaroo.create(KangarooConfig(), Target(LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16)), tiny_tokenizer(), name="wide"))
    with pytest.raises(UserError, match="heads of 32 / 4 elements, this drafter of 16"):
        exported(wide, target, tmp_path / "out")
    with pytest.raises(UserError, match="the format kangaroo holds Kangaroo adapters, this artifact is medusa"):
        exported(Medusa.create(MedusaConfig(num_heads=1), target), target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
