"""Drafters that llama.cpp reads, each in one GGUF file: draft language models and EAGLE-3.

The names of the tensors are those of llama.cpp's own conversion. Its Llama rotates neighbouring numbers of a head where
transformers rotates number i with number i + half: rows of queries and keys are put into that order. EAGLE-3's `d2t`
holds the tokens themselves, not offsets, and its layers are numbered by the states before them.

Shapes: Q entries of the draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...modules import DraftLM, Eagle3, Target, UserError
from ...modules.drafters.draft_lm import as_model
from ...modules.drafters.parts.rotary import frequencies
from ...modules.files.atomic_files import write_file
from ...modules.files.owned_folders import whole_folder
from .eagle import borrows_output, third_tensors
from .parts.compressed_tensors import OUTPUT
from .parts.eagle_folder import MIDLAYER, third_table
from .parts.export_format import ExportFormat, ExportSettings
from .parts.gguf_file import FLOAT32, WEIGHTS, gguf_forms, held, require_tokens, rounded, write_gguf
from .parts.gguf_rope import BY_FACTORS, BY_KEYS, GgufRope, by_factors, by_keys, unsettled
from .parts.layout_folder import EXPORT, layout_readme, stored
from .parts.tensor_table import Table, TensorForm, require_forms, with_table

GGUF_FILE = "draft.gguf"
"""The one file with settings, tokenizer and weights."""
EAGLE3 = "eagle3"
"""llama.cpp's name of the architecture."""
NEIGHBOURS = ("llama", EAGLE3)
"""Architectures whose rotary embedding rotates neighbouring numbers; they alone have factors for its frequencies."""
MODELS = ("llama", "qwen2", "qwen3")
"""Architectures of draft language models, which transformers and llama.cpp call the same."""
_TARGET_LAYERS = 3
"""Tapped layers that llama.cpp reads."""
_THIRD = {"fc.weight": "fc.weight", "d2t": "d2t", "input_norm.weight": "enc.output_norm.weight",
          "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight"}
"""Names of EAGLE-3's tensors that a Llama has not."""


def export_gguf(drafter: DraftLM | Eagle3, target: Target, out: Path, settings: ExportSettings) -> None:
    """Write a draft language model or an EAGLE-3 drafter as llama.cpp reads it.

    Args:
        drafter: bound to `target`.
        target: the model it drafts for.
        out: new, empty, or an earlier export.
        settings: GGUF file of the target, whose tokenizer is copied; number format of the matrices, one of `WEIGHTS`.

    Raises:
        UserError: if llama.cpp does not run the drafter, the GGUF file is not the target's, or `out` cannot be written.
    """
    if isinstance(drafter, Eagle3):
        _require_known(drafter)
    weights, tokens = settings.weights, require_tokens(settings.target_gguf, target.vocab_size, target.identity.name)
    with whole_folder(out, EXPORT) as partial:
        file = partial / GGUF_FILE
        if isinstance(drafter, DraftLM):
            paragraphs = [f"{drafter.num_layers} layers with the vocabulary of the target.", _serve("draft-simple")]
            if drafter.config.depths > 1:
                paragraphs.append("It was trained to answer several tokens in one pass through mask tokens, which "
                                  "llama.cpp does not do with a draft model: here it drafts one by one.")
            readme = layout_readme("A draft language model in GGUF", target, *paragraphs)
            table = write_model(file, as_model(drafter), tokens, weights)
        else:
            readme = layout_readme(
                "EAGLE-3 drafter in GGUF", target, "Its layers are numbered by the states before them: "
                f"{[tap + 1 for tap in drafter.taps]}.", _serve("draft-eagle3"),
                "The artifact's tree is not part of it.")
            table = _write_third(file, drafter, target, tokens, weights)
        write_file(partial / "README.md", with_table(readme, GGUF_FILE, table))


# Draft language models -----------------------------------------------------------------------------------------------


def write_model(file: Path, model: Any, vocabulary: Path, weights: str = FLOAT32) -> Table:
    """Write a causal language model of transformers as GGUF; returns the table of its tensors.

    Args:
        file: its path.
        model: of one of `MODELS`.
        vocabulary: GGUF file whose tokenizer is copied.
        weights: number format of the matrices, one of `WEIGHTS`.

    Raises:
        UserError: if llama.cpp does not run the model, or only after its own conversion.
    """
    config = model.config
    _require_model(config)
    # Llama's rotary embedding is written as factors of its frequencies, that of Qwen as keys.
    said, length = config.rope_parameters, float(model.get_decoder().rotary_emb.attention_scaling)
    if config.model_type in NEIGHBOURS:
        rope = by_factors(model.get_decoder().rotary_emb.inv_freq, length, said["rope_theta"])
    else:
        rope = by_keys({"original_max_position_embeddings": config.max_position_embeddings, **said}, length)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = _settings(hidden=config.hidden_size, inner=config.intermediate_size, layers=config.num_hidden_layers,
                      heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head=head,
                      eps=config.rms_norm_eps, base=said["rope_theta"], vocab=config.vocab_size,
                      context=config.max_position_embeddings)
    tensors = {name: tensor for name, tensor in model.state_dict().items()
               if not (config.tie_word_embeddings and name == "lm_head.weight")}
    kind, heads = config.model_type, (config.num_attention_heads, config.num_key_value_heads)
    named = {_model_name(name, config): _in_order(name, tensor, kind, heads)
             for name, tensor in stored(tensors).items()} | rope.tensors
    write_gguf(file, kind, shape | rope.settings, named, vocabulary, weights)
    table = held({**_model_table(config), **_factor_table(rope)}, weights)
    require_forms(gguf_forms(file), table)
    return table


def _require_model(config: Any) -> None:
    own = "; export it with --format huggingface and convert that folder with llama.cpp's convert_hf_to_gguf.py"
    rope = config.rope_parameters or {}
    factors = config.model_type in NEIGHBOURS
    known = BY_FACTORS if factors else BY_KEYS
    own_setting = "" if factors else unsettled(rope)
    wrong = {
        f"of the architecture {config.model_type}, not one of {', '.join(MODELS)}": config.model_type not in MODELS,
        f"activated by {config.hidden_act}, not by silu": config.hidden_act != "silu",
        f"rotated by {rope.get('rope_type')}, which llama.cpp has not for {config.model_type} (it has "
        f"{', '.join(known)})": rope.get("rope_type") not in known,
        f"rotated by yarn with {own_setting}, for which llama.cpp has no place in {config.model_type}":
            bool(own_setting),
        "rotated in part": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "attending within a window": any(kind != "full_attention" for kind in getattr(config, "layer_types", []) or []),
    }
    if found := [reason for reason, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"the format gguf holds no draft language model {found[0]}{own}")


def _settings(*, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, eps: float, base: float,
              vocab: int, context: int) -> dict[str, Any]:
    """Shape of Llama's layers under llama.cpp's keys."""
    return {"vocab_size": vocab, "context_length": context, "embedding_length": hidden, "block_count": layers,
            "feed_forward_length": inner, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
            "attention.key_length": head, "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": float(eps), "rope.dimension_count": head,
            "rope.freq_base": float(base)}


def _model_name(name: str, config: Any) -> str:
    """llama.cpp's name of a tensor of transformers."""
    import gguf

    kind = {gguf.MODEL_ARCH_NAMES[one]: one for one in gguf.MODEL_ARCH}[config.model_type]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    # A tensor that llama.cpp has no name for fails the comparison with the table.
    return names.get_name(name, try_suffixes=(".weight", ".bias")) or name


def _model_table(config: Any) -> Table:
    """The tensors that transformers asks of a model, under llama.cpp's names."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {_model_name(name, config): TensorForm(tuple(tensor.shape))
            for name, tensor in model.state_dict().items() if name not in tied}


def _factor_table(rope: GgufRope) -> dict[str, TensorForm]:
    return {name: TensorForm(tuple(tensor.shape)) for name, tensor in rope.tensors.items()}


def _in_order(name: str, tensor: Tensor, kind: str, heads: tuple[int, int]) -> Tensor:
    """A weight with the rows of queries and keys in llama.cpp's order.

    Args:
        name: transformers' name.
        tensor: the weight.
        kind: the architecture.
        heads: number of heads of queries, of keys.
    """
    part = name.split(".")[-2:][0]
    if kind not in NEIGHBOURS or part not in ("q_proj", "k_proj"):
        return tensor
    count = heads[part == "k_proj"]
    halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _serve(kind: str) -> str:
    return f"`llama-server -m TARGET.gguf -md THIS_FOLDER/{GGUF_FILE} --spec-type {kind} --spec-draft-n-max 3`"


# EAGLE-3 -------------------------------------------------------------------------------------------------------------


def _require_known(drafter: Eagle3) -> None:
    config = drafter.config
    wrong = {f"{drafter.num_layers} layers": drafter.num_layers != 1,
             f"{len(drafter.taps)} tapped layers": len(drafter.taps) != _TARGET_LAYERS,
             "fc_norm": config.fc_norm, "norm_output": config.norm_output}
    if found := [setting for setting, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"llama.cpp runs EAGLE-3 with one layer, {_TARGET_LAYERS} tapped layers and neither fc_norm "
                        f"nor norm_output, this drafter has {' and '.join(found)}; export it with --format eagle, or "
                        "train another")


def _write_third(file: Path, drafter: Eagle3, target: Target, vocabulary: Path, weights: str) -> Table:
    """Write EAGLE-3; returns the table of its tensors. Raises UserError as `third_tensors` does."""
    block, config = drafter.block, drafter.config
    heads = (block.num_heads, block.num_kv_heads)
    # llama.cpp does not read `t2d`, and takes a whole output layer from the target.
    left_out = ("t2d", OUTPUT) if borrows_output(drafter) else ("t2d",)
    named = {_third_name(name): _in_order(name, tensor, EAGLE3, heads)
             for name, tensor in third_tensors(drafter, target).items() if name not in left_out}
    if drafter.token_ids_Q is not None:
        # The tokens themselves, where the official layout has offsets.
        named["d2t"] = drafter.token_ids_Q.cpu().long()
    scaled, length = frequencies(block.rope_base, block.head_dim, block.rope_scaling, torch.device("cpu"))
    rope = by_factors(scaled, length, block.rope_base)
    settings = {
        **_settings(hidden=block.hidden_size, inner=block.intermediate_size, layers=1, heads=block.num_heads,
                    kv_heads=block.num_kv_heads, head=block.head_dim, eps=block.norm_eps, base=block.rope_base,
                    vocab=drafter.vocab_size, context=target.context_length),
        "target_layers": [tap + 1 for tap in drafter.taps], "target_hidden_size": drafter.hidden_size,
        "norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc}
    write_gguf(file, EAGLE3, settings | rope.settings, named | rope.tensors, vocabulary, weights)
    table = held({_third_name(name): form for name, form in third_table(drafter).items()
                  if name not in left_out} | _factor_table(rope), weights)
    require_forms(gguf_forms(file), table)
    return table


def _third_name(name: str) -> str:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    as_llama = name.replace(MIDLAYER, "model.layers.0.")
    return _THIRD.get(name) or names.get_name(as_llama, try_suffixes=(".weight",)) or name


GGUF = ExportFormat[DraftLM | Eagle3](
    name="gguf", content="draft language models and EAGLE-3 drafters", families=(DraftLM, Eagle3), write=export_gguf,
    option="target_gguf", file=GGUF_FILE, weights=WEIGHTS,
    # llama.cpp rounds the embedding like any matrix.
    as_read=lambda weight, weights, linear: rounded(weight, weights),
)
