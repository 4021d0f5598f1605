"""Hydra heads, Kangaroo adapters and prompt tokens in the layouts of their official code: recorded outputs, the same
tensors after export, refused mistakes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export import ImportSettings, import_drafter
from draftsmith.modules import Features, Hydra, HydraConfig, MedusaConfig, Observation, StaticTree, Target, UserError
from draftsmith.modules.families.kangaroo.drafter import Kangaroo, KangarooConfig
from draftsmith.modules.families.medusa.drafter import Medusa
from draftsmith.modules.families.prompt_tokens.drafter import PromptTokens, PromptTokensConfig
from draftsmith.modules.interfaces.proposer import Frontier
from draftsmith.modules.parts.block_cache import BlockRows
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.modules.token_tree import TokenTree, Topology
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.families import randomised
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .test_engine_contracts import written

FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures"


def recorded(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of the official code."""
    path = FIXTURES / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"the recorded outputs of the official code are not next to the repository ({path.name})")
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def official(folder: Path, name: str, **changes: Any) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """(folder in the official layout, its weights, all recorded tensors)."""
    tensors, said = recorded(name)
    weights = {key.removeprefix("weight/"): value for key, value in tensors.items() if key.startswith("weight/")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads(said["config"]) | changes))
    save_file(weights, folder / ("model.safetensors" if name == "kangaroo" else "hydra_lm_head.safetensors"))
    return folder, weights, tensors


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def small_target(tensors: Mapping[str, Tensor] | None = None) -> Target:
    """A tiny target of the recorded width, with the recorded output layer and embedding."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
                                         pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64))
    known = {"input/target_lm_head": model.lm_head, "weight/input_embed_fn.weight": model.get_input_embeddings()}
    with torch.no_grad():
        for name, layer in known.items():
            if name in (tensors or {}):
                layer.weight.copy_((tensors or {})[name])
    return Target(model, tiny_tokenizer(), name="tiny-target")


# Hydra ----------------------------------------------------------------------------------------------------------------


NAMES = ["hydra_mlp", "hydra_plus_plus"]
UNUSED = "prefix_embeding_layer.embed_tokens.weight"


def features_of(tensors: dict[str, Tensor]) -> Features:
    rows = Features.from_rows([(tensors["input/input_ids"][0].tolist(), [True] * 6)])
    return Features(tokens_BL=rows.tokens_BL, supervised_BL=rows.supervised_BL, segments_BL=rows.segments_BL,
                    positions_BL=rows.positions_BL, final_BLD=tensors["input/hidden_states"])


@pytest.mark.parametrize("name", NAMES)
def test_official_heads_give_the_recorded_outputs(tmp_path: Path, name: str) -> None:
    folder, _, tensors = official(tmp_path / "official", name)
    drafter, said = import_drafter("hydra", folder, small_target(tensors)), config_of(folder)
    assert drafter.config == HydraConfig(num_heads=said["hydra_num_heads"], num_layers=said["hydra_num_layers"],
                                         output="copy", prefix=said["hydra_head_arch"] == "prefix-mlp")
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
    folder, _, tensors = official(tmp_path / "official", name)
    drafter = import_drafter("hydra", folder, small_target(tensors))
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
    folder, weights, tensors = official(tmp_path / "official", name)
    target = small_target(tensors)
    out = written(import_drafter("hydra", folder, target), target, "hydra", tmp_path / "again")
    again = load_file(out / "hydra_lm_head.safetensors")
    assert {key: value.shape for key, value in again.items()} == {key: value.shape for key, value in weights.items()}
    # The official code makes a second embedding that nothing reads; the target's is written there.
    assert all(torch.equal(tensor, weights[key]) for key, tensor in again.items() if key not in (UNUSED, FREQUENCIES))
    if FREQUENCIES in again:
        torch.testing.assert_close(again[FREQUENCIES], weights[FREQUENCIES], atol=0, rtol=1e-6)
    assert config_of(out) == config_of(folder)


FREQUENCIES = "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"


def hydra_heads(target: Target, **settings: object) -> Hydra:
    ids = torch.arange(20) if settings.get("vocabulary_size") else None
    config = HydraConfig(**{"num_heads": 2, **settings})  # type: ignore[arg-type]
    return randomised(Hydra.create(config, target, ids))  # type: ignore[return-value]


@pytest.mark.parametrize("settings", [
    {}, {"num_layers": 3, "prefix": True}, {"vocabulary_size": 20}, {"output": "copy", "num_layers": 2},
    {"output": "one_copy"}, {"output": "one_copy", "vocabulary_size": 20}, {"output": "copy", "vocabulary_size": 20},
    {"num_layers": 2, "tie_blocks": False},
])
def test_hydra_heads_draft_the_same(tmp_path: Path, tiny_target: Target, settings: dict[str, object]) -> None:
    drafter = hydra_heads(tiny_target, **settings)
    back = import_drafter("hydra", written(drafter, tiny_target, "hydra", tmp_path / "out"), tiny_target)
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
    tied = hydra_heads(tiny_target, num_layers=3)
    folder = written(tied, tiny_target, "hydra", tmp_path / "tied")
    assert import_drafter("hydra", folder, tiny_target).config.tie_blocks
    tensors = load_file(folder / "hydra_lm_head.safetensors")
    tensors["hydra_mlp.1.2.linear.bias"] += 1
    save_file(tensors, folder / "hydra_lm_head.safetensors")
    free = import_drafter("hydra", folder, tiny_target)
    assert not free.config.tie_blocks
    torch.testing.assert_close(free.heads[1].blocks[1].linear.bias, tensors["hydra_mlp.1.2.linear.bias"])
    with pytest.raises(UserError, match=r"these heads have 2: train with tie_blocks: true"):
        written(free, tiny_target, "hydra", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_heads_are_named(tmp_path: Path, tiny_target: Target) -> None:
    folder = written(hydra_heads(tiny_target), tiny_target, "hydra", tmp_path / "out")
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


# Kangaroo -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_an_official_adapter_gives_the_recorded_outputs(tmp_path: Path) -> None:
    folder, _, tensors = official(tmp_path / "official", "kangaroo")
    target = small_target(tensors)
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
    folder, weights, tensors = official(tmp_path / "official", "kangaroo")
    target = small_target(tensors)
    drafter = import_drafter("kangaroo", folder, target, ImportSettings(exit_layer=2))
    again = written(drafter, target, "kangaroo", tmp_path / "again")
    found = load_file(again / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    config = config_of(again)
    own = {"draftsmith_exit_layer": 2, "draftsmith_gamma": 6, "draftsmith_eta": 0.6}
    assert config == config_of(folder) | own
    assert "--exitlayer 2 --threshold 0.6 --steps 6" in (again / "README.md").read_text()


def test_exit_gamma_and_eta_come_back_with_a_reduced_vocabulary_made_whole(tmp_path: Path) -> None:
    target = small_target()
    config = KangarooConfig(exit_layer=2, gamma=3, eta=0.25, vocabulary_size=4)
    drafter = randomised(Kangaroo.create(config, target, torch.tensor([1, 5, 9, 30])))
    again = import_drafter("kangaroo", written(drafter, target, "kangaroo", tmp_path / "out"), target)
    assert again.config == KangarooConfig(exit_layer=2, gamma=3, eta=0.25)
    own = drafter.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in again.state_dict().items())
    assert own.keys() - again.state_dict().keys() == {"token_ids"}


def test_a_layout_without_an_exit_layer_asks_for_it(tmp_path: Path) -> None:
    folder, _, tensors = official(tmp_path / "official", "kangaroo")
    with pytest.raises(UserError, match=r"after which layer .* the adapter comes; give it with --exit_layer"):
        import_drafter("kangaroo", folder, small_target(tensors))


def test_an_adapter_for_another_target_is_refused(tmp_path: Path) -> None:
    folder, weights, tensors = official(tmp_path / "official", "kangaroo", draftsmith_exit_layer=3)
    target = small_target(tensors)
    with pytest.raises(UserError, match="exit_layer must be below the 3 layers of tiny-target, got 3"):
        import_drafter("kangaroo", folder, target)
    save_file({**weights, "norm.weight": torch.ones(31)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"the kangaroo drafter in .* does not fit .* tiny-target"):
        import_drafter("kangaroo", folder, target, ImportSettings(exit_layer=1))


def test_what_the_official_code_cannot_run_is_refused(tmp_path: Path) -> None:
    target = small_target()
    turned = Kangaroo.create(KangarooConfig(rope_base=5e5), target)
    with pytest.raises(UserError, match="rotates with the base 10000, this adapter with 500000; train with rope_base"):
        written(turned, target, "kangaroo", tmp_path / "out")
    wide = Kangaroo.create(KangarooConfig(), Target(LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16)), tiny_tokenizer(), name="wide"))
    with pytest.raises(UserError, match="heads of 32 / 4 elements, this drafter of 16"):
        written(wide, target, "kangaroo", tmp_path / "out")
    for layout, held in (("kangaroo", "Kangaroo adapters"), ("ppd", "prompt tokens")):
        with pytest.raises(UserError, match=f"the format {layout} holds {held}, this artifact is medusa"):
            written(Medusa.create(MedusaConfig(num_heads=1), target), target, layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Prompt tokens --------------------------------------------------------------------------------------------------------


def official_prompts(folder: Path, **changes: Any) -> tuple[Path, Target, dict[str, Tensor]]:
    """(folder in the official layout, the recorded target, all recorded tensors)."""
    tensors, said = recorded("ppd")
    config, model = json.loads(said["config"]), LlamaForCausalLM(LlamaConfig(**json.loads(said["base_config"])))
    prefix = "weight/base_model."
    model.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()
                           if name.startswith(prefix)})
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file({"prompt_embeddings": tensors["weight/prompt_encoder.default.embedding.weight"]},
              folder / "adapter_model.safetensors")
    return folder, Target(model, tiny_tokenizer(), name="tiny-target"), tensors


@torch.no_grad()
def test_official_prompts_give_the_recorded_outputs(tmp_path: Path) -> None:
    """Both ways: all positions at once as in training, and virtual nodes of a pass."""
    folder, target, tensors = official_prompts(tmp_path / "official")
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
    folder, target, tensors = official_prompts(tmp_path / "official")
    again = written(import_drafter("ppd", folder, target), target, "ppd", tmp_path / "again")
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
    again = import_drafter("ppd", written(drafter, target, "ppd", tmp_path / "out"), target)
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
    folder, target, _ = official_prompts(tmp_path / "official", **changes)
    with pytest.raises(UserError, match=words):
        import_drafter("ppd", folder, target)
