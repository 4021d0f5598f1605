"""The table of every causal architecture of transformers that can be built small: decoded exactly, or refused and why.

    PYTHONPATH=tests python -m support.architecture_table     # writes it into recipes/guides/your-model-and-data.md
"""

import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from draftsmith.modules import Target, TokenTree, UserError
from draftsmith.modules.target.loading.self_check import LIBRARY_ERRORS
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from huggingface_hub.errors import StrictDataclassError
from support.targets import RECURRENT, SHAPE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

GUIDE = Path(__file__).resolve().parents[2] / "recipes/guides/your-model-and-data.md"
START, END = "<!-- targets: written by tests/support/architecture_table.py -->", "<!-- end of targets -->"
MOST_PARAMETERS = 8_000_000  # Largest model that is built
SMALL: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "decoder_ffn_dim": 32, "encoder_ffn_dim": 32, "decoder_layers": 3, "encoder_layers": 3,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
}
"""Sizes beyond those of `SHAPE`."""
FOUR_LAYERS = {"num_hidden_layers": 4}
OWN: dict[str, dict[str, Any]] = {
    **RECURRENT, "Qwen4ExpText": RECURRENT["Qwen3Next"], "BailingHybrid": FOUR_LAYERS | {"layer_group_size": 2},
    "Gemma4Text": FOUR_LAYERS | {"vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8,
                                 "global_head_dim": 16, "num_kv_shared_layers": 0},
}
"""What single architectures need besides."""
USED = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5Text", "Mistral", "Mixtral", "Gemma2", "Gemma3Text",
        "Phi3", "Olmo3", "SmolLM3", "Granite", "NemotronH", "Lfm2", "FalconH1", "KimiLinear", "DeepseekV3", "GptOss")
"""Those that people serve most."""
EXACT = "exact"


def causal_architectures() -> dict[str, tuple[type, type]]:
    """Configuration and model class of each causal architecture, by the configuration's name."""
    found = {}
    for config_class, model_class in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        classes = model_class if isinstance(model_class, tuple) else (model_class,)
        found[config_class.__name__.removesuffix("Config")] = (config_class, classes[0])
    return found


def small_model(name: str) -> Any | None:
    """A random model of an architecture in float32; None where its configuration cannot be made small."""
    config_class, model_class = causal_architectures()[name]
    wanted = SHAPE | SMALL | OWN.get(name, {})
    try:
        known = {*inspect.signature(config_class.__init__).parameters, *config_class().to_dict(),  # type: ignore[misc]
                 *config_class.attribute_map}  # type: ignore[attr-defined]
        if "kv_lora_rank" in known and "head_dim" not in OWN.get(name, {}):
            # Latent attention has keys for every head, and derives their width.
            wanted = {field: value for field, value in wanted.items() if field != "head_dim"}
            wanted["num_key_value_heads"] = wanted["num_attention_heads"]
        config = config_class(**{field: value for field, value in wanted.items() if field in known})
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
        if parameters > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        return model_class(config).eval()
    except (*LIBRARY_ERRORS, StrictDataclassError):
        # Its own code, on a configuration of numbers that do not suit it.
        return None


def verdict(name: str) -> str | None:
    """EXACT where a tree is read as the model reads its paths, or the reason of the refusal; None for no small model.
    """
    model = small_model(name)
    if model is None:
        return None
    try:
        target = Target(model, tiny_tokenizer(), name=name)
    except UserError as error:
        return str(error)
    generator = torch.Generator().manual_seed(1)
    rows, prompt = target.start(1, 64), torch.randint(3, 60, (1, 11), generator=generator)
    with torch.no_grad():
        rows.run(TokenTree.prompts(prompt, torch.tensor([11])))
        rows.commit(torch.arange(11)[None], torch.tensor([11]), [11], moved=False)
        parents = torch.tensor([[-1, 0, 0, 1, 2, 4]])
        tree = TokenTree.from_parents(torch.randint(3, 60, (1, 6), generator=generator), parents)
        found = rows.run(tree).logits_BMV[0]
        for node in range(6):
            path = tree.tokens_BN[:, tree.ancestors_BNN[0, node]]
            own = read_own(target, prompt, path)
            gap = float((found[node] - own).abs().max() / own.abs().max())
            assert gap < 5e-3, f"{name} reads node {node} of a tree {gap:.2g} away from its own forward pass"
    return EXACT


def read_own(target: Target, prompt_1L: torch.Tensor, path_1N: torch.Tensor) -> torch.Tensor:
    """The model's own logits after a path: in one pass, or with recurrent layers step by step, as `generate` reads."""
    with target.native() as model:
        if not target.recurrent:
            whole: torch.Tensor = model(input_ids=torch.cat([prompt_1L, path_1N], dim=1), use_cache=False).logits
            return whole[0, -1]
        output = model(input_ids=prompt_1L, use_cache=True)
        for place, token in enumerate(path_1N[0].tolist(), start=prompt_1L.shape[1]):
            output = model(input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[place]]), use_cache=True,
                           past_key_values=output.past_key_values)
    step: torch.Tensor = output.logits[0, -1]
    return step


def reason(words: str) -> str:
    """A refusal without what belongs to one architecture: its names and numbers."""
    sentence = re.split(r"\. | \(|; |: ", words)[0]
    sentence = re.sub(r"^(?!this )\w+ ", "it ", sentence)
    return re.sub(r"list of \d+ layers", "list of its layers", sentence)


def table() -> str:
    """The section of the guide."""
    groups: dict[str, list[str]] = {}
    for name in sorted(causal_architectures(), key=str.lower):
        found = verdict(name)
        if found is not None:
            groups.setdefault(found if found == EXACT else f"refused: {reason(found)}", []).append(name)
    count = sum(map(len, groups.values()))
    lines = [f"The {count} causal architectures of transformers {transformers.__version__} that can be built small, by "
             "the names of their configurations:", "", "| verdict | architectures |", "|---|---|"]
    lines += [f"| {words} | {', '.join(names)} |" for words, names in groups.items()]
    return "\n".join(lines)


def main() -> None:
    """Write the section anew."""
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(START)
    GUIDE.write_text(f"{before}{START}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
