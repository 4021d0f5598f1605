"""Hydra heads in the official layout: the official code's outputs, the same names after export, refused mistakes."""

import json
from pathlib import Path

import pytest
import torch
from draftsmith.export import Artifact, export_artifact, import_drafter
from draftsmith.modules import Features, Hydra, HydraConfig, Observation, StaticTree, Target, Topology, UserError
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import randomised
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures"
NAMES = ["hydra_mlp", "hydra_plus_plus"]
UNUSED = "prefix_embeding_layer.embed_tokens.weight"


def fixture(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    path = FIXTURES / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"the recorded outputs of the official code are not next to the repository ({path.name})")
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def official_target(tensors: dict[str, Tensor]) -> Target:
    """A tiny target with the recorded output layer and embedding."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    with torch.no_grad():
        model.lm_head.weight.copy_(tensors["input/target_lm_head"])
        model.get_input_embeddings().weight.copy_(tensors["weight/input_embed_fn.weight"])
    return Target(model, tiny_tokenizer(), name="tiny-target")


def official_folder(folder: Path, tensors: dict[str, Tensor], config: str) -> tuple[Path, dict[str, Tensor]]:
    weights = {key.removeprefix("weight/"): value for key, value in tensors.items() if key.startswith("weight/")}
    folder.mkdir()
    (folder / "config.json").write_text(config)
    save_file(weights, folder / "hydra_lm_head.safetensors")
    return folder, weights


def features_of(tensors: dict[str, Tensor]) -> Features:
    rows = Features.from_rows([(tensors["input/input_ids"][0].tolist(), [True] * 6)])
    return Features(tokens_BL=rows.tokens_BL, supervised_BL=rows.supervised_BL, segments_BL=rows.segments_BL,
                    positions_BL=rows.positions_BL, final_BLD=tensors["input/hidden_states"])


@pytest.mark.parametrize("name", NAMES)
def test_official_heads_give_the_recorded_outputs(tmp_path: Path, name: str) -> None:
    tensors, said = fixture(name)
    folder, _ = official_folder(tmp_path / "official", tensors, said["config"])
    drafter = import_drafter("hydra", folder, official_target(tensors))
    official = json.loads(said["config"])
    assert drafter.config == HydraConfig(num_heads=official["hydra_num_heads"], num_layers=official["hydra_num_layers"],
                                         output="copy", prefix=official["hydra_head_arch"] == "prefix-mlp")
    features = features_of(tensors)
    with torch.no_grad():
        if drafter.config.prefix:
            torch.testing.assert_close(drafter.context(features), tensors["output/prefix_hidden"], atol=1e-5, rtol=1e-5)
        hidden = drafter(features).hidden_BLKD
    for step in range(drafter.config.num_heads):
        # The official code rotates the embeddings: at the last positions its heads read the first tokens.
        real = slice(0, 6 - 1 - step)
        torch.testing.assert_close(hidden[:, real, step], tensors["output/hydra_hidden"][step][:, real],
                                   atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            logits = drafter.project(hidden[:, real, step], step)
        torch.testing.assert_close(logits, tensors["output/hydra_logits"][step][:, real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_official_heads_propose_the_recorded_tree(tmp_path: Path, name: str) -> None:
    tensors, said = fixture(name)
    folder, _ = official_folder(tmp_path / "official", tensors, said["config"])
    drafter = import_drafter("hydra", folder, official_target(tensors))
    tree = StaticTree(Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)]))
    state, read = drafter.start(1, 16), 0
    for end, suffix in ((4, "_after_4"), (6, "_after_6")) if name == "hydra_plus_plus" else ((6, ""),):
        root = tensors["output/target_logits"][:, end - 1].argmax(-1)
        drafter.observe(state, torch.tensor([0]), Observation(
            tokens_BN=tensors["input/input_ids"][:, read:end], counts_B=torch.tensor([end - read]), taps={},
            final_BND=tensors["input/hidden_states"][:, read:end], roots_B=root))
        read = end
        if drafter.config.prefix:
            torch.testing.assert_close(state.context.values, tensors["output/prefix_hidden_cached"][:, end - 1],
                                       atol=1e-5, rtol=1e-5)
        grown = tree.grow(drafter, state, root)
        assert torch.equal(grown.tokens_BN, tensors[f"output/tree_tokens{suffix}"])


@pytest.mark.parametrize("name", NAMES)
def test_official_heads_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    tensors, said = fixture(name)
    target = official_target(tensors)
    folder, weights = official_folder(tmp_path / "official", tensors, said["config"])
    drafter = import_drafter("hydra", folder, target)
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(1), identity=target.identity,
                        provenance={})
    export_artifact(artifact, target, "hydra", tmp_path / "again")
    again = load_file(tmp_path / "again" / "hydra_lm_head.safetensors")
    assert {key: value.shape for key, value in again.items()} == {key: value.shape for key, value in weights.items()}
    # The official code makes a second embedding that nothing reads; the target's is written there.
    assert all(torch.equal(tensor, weights[key]) for key, tensor in again.items() if key not in (UNUSED, FREQUENCIES))
    if FREQUENCIES in again:
        torch.testing.assert_close(again[FREQUENCIES], weights[FREQUENCIES], atol=0, rtol=1e-6)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(said["config"])


FREQUENCIES = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"


def heads(target: Target, **settings: object) -> Hydra:
    ids = torch.arange(20) if settings.get("vocabulary_size") else None
    config = HydraConfig(**{"num_heads": 2, **settings})  # type: ignore[arg-type]
    return randomised(Hydra.create(config, target, ids))  # type: ignore[return-value]


def written(drafter: Hydra, target: Target, out: Path) -> Path:
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(1), identity=target.identity,
                        provenance={})
    return export_artifact(artifact, target, "hydra", out)


@pytest.mark.parametrize("settings", [
    {}, {"num_layers": 3, "prefix": True}, {"vocabulary_size": 20}, {"output": "copy", "num_layers": 2},
    {"output": "one_copy"}, {"output": "one_copy", "vocabulary_size": 20}, {"output": "copy", "vocabulary_size": 20},
    {"num_layers": 2, "tie_blocks": False},
])
def test_export_and_import_draft_the_same(tmp_path: Path, tiny_target: Target, settings: dict[str, object]) -> None:
    drafter = heads(tiny_target, **settings)
    back = import_drafter("hydra", written(drafter, tiny_target, tmp_path / "out"), tiny_target)
    features = tiny_target.encode(Features.from_rows([([9, 8, 7, 30, 31, 32], [True] * 6)]))
    with torch.no_grad():
        ours, theirs = drafter(features).hidden_BLKD, back(features).hidden_BLKD
        assert torch.equal(ours, theirs)
        logits, whole = drafter.project(ours[:, :, 1], 1), back.project(theirs[:, :, 1], 1)
    torch.testing.assert_close(whole if drafter.token_ids_Q is None else whole[..., drafter.token_ids_Q], logits,
                               atol=1e-5, rtol=1e-5)
    if drafter.token_ids_Q is not None and settings.get("output"):
        assert torch.equal(whole.argmax(-1), drafter.token_ids_Q[logits.argmax(-1)])


def test_blocks_that_differ_are_read_and_not_written(tmp_path: Path, tiny_target: Target) -> None:
    tied = heads(tiny_target, num_layers=3)
    folder = written(tied, tiny_target, tmp_path / "tied")
    assert import_drafter("hydra", folder, tiny_target).config.tie_blocks
    tensors = load_file(folder / "hydra_lm_head.safetensors")
    tensors["hydra_mlp.1.2.linear.bias"] += 1
    save_file(tensors, folder / "hydra_lm_head.safetensors")
    free = import_drafter("hydra", folder, tiny_target)
    assert not free.config.tie_blocks
    torch.testing.assert_close(free.heads[1].blocks[1].linear.bias, tensors["hydra_mlp.1.2.linear.bias"])
    with pytest.raises(UserError, match=r"these heads have 2: train with tie_blocks: true"):
        written(free, tiny_target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoints_are_named(tmp_path: Path, tiny_target: Target) -> None:
    folder = written(heads(tiny_target), tiny_target, tmp_path / "out")
    path, tensors = folder / "hydra_lm_head.safetensors", load_file(folder / "hydra_lm_head.safetensors")

    def refused(changed: dict[str, Tensor], message: str) -> None:
        save_file(changed, path)
        with pytest.raises(UserError, match=message):
            import_drafter("hydra", folder, tiny_target)

    refused({**tensors, "lm_head.weight": torch.zeros(2)}, "holds 'lm_head.weight', no tensor of Hydra heads")
    refused({**tensors, "input_embed_fn.weight": torch.randn(3, 32)}, "is not that of tiny-random")
    embedding = tensors["input_embed_fn.weight"]
    refused({**tensors, "input_embed_fn.weight": embedding.roll(1, 0)}, "belong to another target")
    refused({"hydra_lm_head.0.bias": torch.zeros(2)}, r"no tensor hydra_mlp")
    refused({k: v for k, v in tensors.items() if k != "hydra_mlp.1.0.linear.bias"}, "does not fit .*Missing")
    refused({**tensors, "hydra_mlp.1.0.linear.bias": torch.zeros(5)}, "does not fit .*tiny-random.*size mismatch")
    half = {**tensors, "input_embed_fn.weight": embedding.to(torch.float16)}
    save_file(half, path)
    assert import_drafter("hydra", folder, tiny_target).config.num_heads == 2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_state_offset": 1}))
    with pytest.raises(UserError, match="hidden_state_offset: 1; only 0 can be imported"):
        import_drafter("hydra", folder, tiny_target)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        import_drafter("hydra", folder, tiny_target)
    (folder / "config.json").unlink()
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        import_drafter("hydra", folder, tiny_target)
    path.unlink()
    with pytest.raises(UserError, match=r"is a pickle, which is never read: if you trust it, convert.*torch.load"):
        import_drafter("hydra", folder, tiny_target)
