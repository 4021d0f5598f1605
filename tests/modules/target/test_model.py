"""Every supported architecture: tree passes against the model's own forward over each path, taps, head, refusals."""

from itertools import product
from typing import Any

import pytest
import torch
import transformers
from draftsmith.export.evaluation.lossless import Judge
from draftsmith.modules import DecodeSettings, Features, Request, StaticTree, Target, TokenTree, UserError, decode
from draftsmith.modules.target.loading.loading import TargetConfig, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.answers import native_greedy, texts_of, unplaced
from support.drafters import ScriptedDrafter
from support.policies import branching, commit_path, random_trees
from support.targets import TRAITS, random_model, random_trait
from support.tiers import others_long

pytestmark = pytest.mark.usefixtures("on_device")

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4}),
    "qwen3-head-dim": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "gemma2": ("Gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0,
                          "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "qwen3-moe": ("Qwen3Moe", {}),
    "minimax-m2": ("MiniMaxM2", {}),
}
QUICK = ("gpt-oss", "deepseek-v3", "gemma4-e2b", "llama4")  # Those of `TRAITS` that `make test` runs


def build(name: str, dtype: torch.dtype) -> Target:
    if name in TRAITS:
        return Target(random_trait(name, dtype), tiny_tokenizer(), name=name)
    family, changes = ARCHITECTURES[name]
    return Target(random_model(family, **changes).to(dtype), tiny_tokenizer(), name=name)


@pytest.fixture(params=[*ARCHITECTURES, *others_long(TRAITS, QUICK)])
def target(request: pytest.FixtureRequest) -> Target:
    return build(request.param, torch.float64)


def tolerance(target: Target) -> float:
    # The attention of these, as transformers has it, keeps a softmax, a rotation or the routing in float32.
    rounded = ("gemma2", "minimax-m2", "granite-swa", "granite-moe-swa", "deepseek-v2", "deepseek-v3", "glm-4.7-flash",
               "mimo-v2-flash", "llama4")
    return 2e-5 if target.identity.name in rounded else 1e-9


def test_tree_passes_equal_a_fresh_forward_of_every_path(target: Target) -> None:
    """Ragged rows, different trees, several rounds with different accepted lengths, windows exceeded."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 100, (count,), generator=generator).tolist() for count in (40, 5)]
    rows = target.start(2, 96)
    width = max(map(len, texts))
    padded = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    counts = torch.tensor([len(text) for text in texts])
    rows.run(TokenTree.prompts(padded, counts))
    rows.commit(torch.arange(width).expand(2, -1), counts, counts.tolist(), moved=False)
    for _ in range(4):
        tree = random_trees(2, 8, generator)
        found = rows.run(tree).logits_BMV
        for row, node in product(range(2), range(8)):
            full = texts[row] + tree.tokens_BN[row, tree.ancestors_BNN[row, node]].tolist()
            with target.native() as model, torch.no_grad():
                expected = model(torch.tensor([full])).logits[0, -1]
            torch.testing.assert_close(found[row, node], expected, atol=tolerance(target), rtol=0)
        ends = torch.randint(0, 8, (2,), generator=generator).tolist()
        texts = [text + taken for text, taken in zip(texts, commit_path(rows, tree, ends), strict=True)]


def test_greedy_decoding_equals_generate(target: Target) -> None:
    requests = [Request((5, 9, 33, 71, 8, 20), 0, 24), Request((40, 41), 1, 24)]
    for request, generation in zip(
        requests, decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True)).generations, strict=True):
        with target.native() as model:
            expected = model.generate(torch.tensor([request.tokens]), max_new_tokens=24, do_sample=False,
                                      eos_token_id=None, pad_token_id=0)[0, len(request.tokens) :]
        assert generation.tokens == expected.tolist()


@pytest.mark.parametrize("target", ["llama", *others_long(TRAITS, ("gpt-oss", "llama4"))], indirect=True)
def test_sampled_answers_are_draws_of_the_untouched_model(target: Target) -> None:
    """Every token of a drafted answer, by the random number of its place."""
    settings = DecodeSettings(batch_size=2, ignore_eos=True, seed=3)
    requests = [Request((5, 9, 33, 71, 8, 20), 0, 14, 1.0), Request((40, 41), 1, 14, 1.0)]
    plain = [one.tokens for one in decode(target, requests, settings).generations]
    texts = texts_of(requests, plain)
    drafter, tree = ScriptedDrafter(target.vocab_size, texts, "mixed"), StaticTree(branching(2, 2, 1).topology)
    drafted = decode(target, requests, settings, drafter=drafter, policy=tree).generations
    judge = Judge(target, settings)
    for request, answer, own in zip(requests, drafted, plain, strict=True):
        assert judge.compare(request, answer.tokens, own).divergence is None


def test_taps_head_and_packed_segments(target: Target) -> None:
    """Taps equal transformers' hidden states, the head equals its logits, and a segment does not see its neighbour."""
    first, second = [5, 9, 33, 71, 8], [40, 41, 60]
    batch = Features(tokens_BL=torch.tensor([first + second]), supervised_BL=torch.ones(1, 8, dtype=torch.bool),
                     segments_BL=torch.tensor([[0] * 5 + [1] * 3]), positions_BL=torch.tensor([[*range(5), *range(3)]]))
    encoded = target.encode(batch, taps=(0, 1))
    offset = 0
    for text in (first, second):
        with target.native() as model, torch.no_grad():
            expected = model(torch.tensor([text]), output_hidden_states=True)
        here = slice(offset, offset + len(text))
        bound = {"atol": tolerance(target), "rtol": 0.0}
        torch.testing.assert_close(encoded.taps[0][0, here], expected.hidden_states[1][0], **bound)
        torch.testing.assert_close(encoded.taps[1][0, here], expected.hidden_states[2][0], **bound)
        torch.testing.assert_close(encoded.final()[0, here], expected.hidden_states[-1][0], **bound)
        torch.testing.assert_close(target.logits(encoded.final()[:, here]), expected.logits, **bound)
        offset += len(text)


def test_virtual_nodes_are_attended_to_and_carry_their_embedding(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    virtual = torch.randn(1, 1, target.hidden_size, dtype=torch.float64)
    tree = TokenTree.from_parents(torch.tensor([[7, 8, 0]]), torch.tensor([[-1, 0, 1]]),
                                  torch.tensor([[True, True, True]]))
    tree = TokenTree(**{**vars(tree), "virtual": unplaced(virtual), "real_BN": torch.tensor([[True, True, False]])})
    found = target.start(1, 8).run(tree).logits_BMV[0, 2]
    embedded = torch.cat([target.embed(torch.tensor([[7, 8]])), virtual], dim=1)
    with target.native() as model, torch.no_grad():
        expected = model(inputs_embeds=embedded).logits[0, -1]
    torch.testing.assert_close(found, expected)


def test_the_weights_hash_sees_a_change_and_not_the_dtype() -> None:
    def identity(model: Any) -> str:
        return Target(model, tiny_tokenizer(), name="x").identity.weights_hash

    base = identity(tiny_model())
    assert identity(tiny_model(dtype=torch.float64)) == base
    assert identity(tiny_model(dtype=torch.bfloat16)) == base
    changed = tiny_model()
    changed.model.layers[1].mlp.down_proj.weight.data *= 1.01
    assert identity(changed) != base


@pytest.mark.parametrize(("family", "reason"), [
    ("Mamba", "MambaForCausalLM takes no position_ids and no past_key_values"),
    ("Rwkv", "RwkvForCausalLM keeps a recurrent state of a kind that this version cannot verify in trees"),
])
def test_recurrent_targets_of_unknown_kinds_are_refused(family: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"{reason}.*Choose a target"):
        Target(random_model(family), tiny_tokenizer(), name=family)


def test_several_streams_of_states_are_no_taps() -> None:
    model = random_model("Gemma3n", layer_types=["sliding_attention", "full_attention"] * 3, num_hidden_layers=6,
                         num_kv_shared_layers=2, sliding_window=8, hidden_size_per_layer_input=8, laurel_rank=4,
                         vocab_size_per_layer_input=100, activation_sparsity_pattern=None)
    target = Target(model, tiny_tokenizer(), name="gemma3n")
    requests = [Request((5, 9, 33, 71, 8, 20), 0, 12)]
    assert decode(target, requests, DecodeSettings(ignore_eos=True)).generations[0].tokens == native_greedy(
        target, requests[0].tokens, 12)
    with pytest.raises(UserError, match=r"layer 1 of Gemma3nForCausalLM hands on several streams of states"):
        target.encode(Features.from_rows([([5, 6, 7], [True] * 3)]), taps=(1,))


@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT", "Phi", "Gemma2"])
def test_the_last_norm_follows_the_last_layer(family: str) -> None:
    target = Target(random_model(family), tiny_tokenizer(), name=family)
    text = target.encode(Features.from_rows([([5, 6, 7, 70], [True] * 4)]), taps=(target.num_layers - 1,))
    torch.testing.assert_close(target.normed(text.taps[target.num_layers - 1].cpu()), text.final().cpu())


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa", "HYV4"])
def test_indexed_attention_is_refused_by_name(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=2, hidden_size=32)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=f"{family}ForCausalLM has layers of the kind indexed_attention, which"):
        Target(model, tiny_tokenizer(), name=family)


@pytest.mark.parametrize(("config", "message"), [
    (TargetConfig(name="/nowhere/model.gguf"), "GGUF file .* does not exist"),
    (TargetConfig(name="no-such-user/no-such-model"),
     r"could not be loaded \(no such folder is here .* set target.name to a hub id"),
    (TargetConfig(name="tiny-random", device="cuda:9" if not torch.cuda.is_available() else "tpu"), "device"),
    (TargetConfig(name="tiny-random", dtype="int8"), "dtype must be"),  # type: ignore[arg-type]
    (TargetConfig(name="tiny-random", chat_template="/nowhere.jinja"), "could not be read"),
])
def test_bad_targets_are_one_sentence(config: TargetConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_target(config)


@pytest.mark.long
@pytest.mark.real
def test_packed_layers_change_the_real_logits_by_rounding_only(real_target: Target) -> None:
    ids = torch.tensor([real_target.tokenizer("The quick brown fox jumps over the lazy dog.")["input_ids"]])
    with real_target.native() as model, torch.no_grad():
        expected = model(ids).logits
    rows = real_target.start(1, 32)
    with real_target.reproducible():
        assert real_target.linears.packing.packed_from == 1
        found = rows.run(TokenTree.prompts(ids, torch.tensor([ids.shape[1]]))).logits_BMV
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
