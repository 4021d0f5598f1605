"""Drafters that llama.cpp reads, each in one GGUF file: draft language models, EAGLE-3, DFlash, DFlash 2 and DSpark.

The names of the tensors are those of llama.cpp's own conversion. Its Llama rotates neighbouring numbers of a head where
transformers rotates number i with number i + half: rows of queries and keys are put into that order. EAGLE-3's `d2t`
holds the tokens themselves, not offsets, and its layers are numbered by the states before them; those of DFlash, whose
rotary embedding is transformers' own, too.

Shapes: Q entries of the draft vocabulary."""

import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...modules import BlockDraft, DraftLM, Eagle3, PEagle, Target, UserError
from ...modules.families.block import layout as blocks
from ...modules.families.block.corrections import Selector
from ...modules.families.draft_lm.drafter import as_model
from ...modules.families.eagle3 import layout as eagle3
from ...modules.interfaces.layout import Pairs, there
from ...modules.parts.attention import frequencies
from ...modules.parts.decoder_block import BlockConfig
from ...modules.target.submodel import config_of, fields_of
from . import dflash
from .eagle import borrows_output, third_tensors
from .parts import gguf_file
from .parts.checkpoint import Contents, Table, output_bias, stored
from .parts.compressed_tensors import OUTPUT
from .parts.export_format import ExportFormat, ExportSettings, Places
from .parts.gguf_file import FLOAT32, WEIGHTS, require_tokens, rounded, write_gguf

GGUF_FILE = "draft.gguf"  # The one file with settings, tokenizer and weights
EAGLE3, DFLASH = "eagle3", "dflash"  # llama.cpp's names of the architectures; DSpark is DFlash with a correction
NEIGHBOURS = ("llama", EAGLE3)
"""Architectures whose rotary embedding rotates neighbouring numbers; they alone have factors for its frequencies."""
MODELS = ("llama", "qwen2", "qwen3")  # Architectures of draft language models, in transformers and llama.cpp alike
_TARGET_LAYERS = 3  # Tapped layers that llama.cpp reads


def export_gguf(drafter: DraftLM | Eagle3 | BlockDraft, target: Target, folder: Path,
                settings: ExportSettings) -> Contents:
    """Write a draft language model, an EAGLE-3 drafter or a drafter of blocks as llama.cpp reads it, with the tokenizer
    of the target's GGUF file. Raises UserError if that is not the target's."""
    file, weights = folder / GGUF_FILE, settings.weights
    tokens = require_tokens(settings.target_gguf, target.vocab_size, target.identity.name)
    held = f"`{Places.gguf}` stands for the target's GGUF file, {tokens.name}, from which the tokenizer was copied."
    if not isinstance(drafter, DraftLM):
        title = "EAGLE-3" if isinstance(drafter, Eagle3) else blocks.KINDS[drafter.config.correction].title
        table = _write_states(file, drafter, target, tokens, weights)
        return Contents(title=f"{title} drafter in GGUF", note=held, table=table)
    return Contents(title="A draft language model in GGUF", note=held,
                    table=write_model(file, as_model(drafter), tokens, weights))


def _refusal(drafter: DraftLM | Eagle3 | BlockDraft, target: Target) -> str:
    """The refusal of a drafter that llama.cpp does not run, or only after its own conversion; empty for any other."""
    if isinstance(drafter, DraftLM):
        return _model_refusal(config_of(fields_of(drafter.architecture)))
    if isinstance(drafter, BlockDraft):
        rope = {"rope_type": "default", **(drafter.block.rope_scaling or {})}
        most = drafter.correction.most if isinstance(drafter.correction, Selector) else 0
        if reason := dflash.refusal(drafter, target):
            return reason
        able = [name for name, kind in blocks.KINDS.items() if "llama.cpp" in kind.engines]
        wrong = {f"the correction {drafter.config.correction}": drafter.config.correction not in able,
                 f"window {drafter.window}": drafter.window is not None,
                 # llama.cpp keeps candidates and the scores of their pairs in a slot's state.
                 f"a width of {drafter.hidden_size}, where a selector needs {most * (most + 1)}":
                     drafter.hidden_size < most * (most + 1),
                 f"a rotary embedding of the kind {rope['rope_type']}": rope["rope_type"] not in gguf_file.BY_KEYS,
                 f"YaRN with {gguf_file.unsettled(rope)}": bool(gguf_file.unsettled(rope))}
        found = " and ".join(setting for setting, is_wrong in wrong.items() if is_wrong)
        return found and (
            f"llama.cpp runs drafters of blocks with one of the corrections {', '.join(able)}, rotated by one of "
            f"{', '.join(gguf_file.BY_KEYS)}, this drafter has {found}; train another")
    config = drafter.config
    wrong = {"all guesses in one pass": isinstance(drafter, PEagle),
             f"{drafter.num_layers} layers": drafter.num_layers != 1,
             f"{len(drafter.taps)} tapped layers": len(drafter.taps) != _TARGET_LAYERS,
             "fc_norm": config.fc_norm, "norm_output": config.norm_output, "qk_norm": drafter.block.qk_norm,
             f"window {drafter.window}": drafter.window is not None}
    found = " and ".join(setting for setting, is_wrong in wrong.items() if is_wrong)
    return output_bias(target) if not found else (
        f"llama.cpp runs EAGLE-3 with one layer, {_TARGET_LAYERS} tapped layers and neither fc_norm, norm_output, "
        f"qk_norm nor window, this drafter has {found}; train another")


# Draft language models ------------------------------------------------------------------------------------------------


def write_model(file: Path, model: Any, vocabulary: Path, weights: str = FLOAT32) -> Table:
    """Write a causal language model of transformers as GGUF, with the tokenizer of another GGUF file and matrices in a
    format of `WEIGHTS`; returns the table of its tensors. Raises UserError if llama.cpp does not run it as it is."""
    config = model.config
    if reason := _model_refusal(config):
        raise UserError(reason)
    # Llama's rotary embedding is written as factors of its frequencies, that of Qwen as keys.
    said, length = config.rope_parameters, float(model.get_decoder().rotary_emb.attention_scaling)
    if config.model_type in NEIGHBOURS:
        rope, factors = gguf_file.by_factors(model.get_decoder().rotary_emb.inv_freq, length, said["rope_theta"])
    else:
        rope = gguf_file.by_keys({"original_max_position_embeddings": config.max_position_embeddings, **said}, length)
        factors = {}
    block = BlockConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads, norm_eps=config.rms_norm_eps,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rope_base=said["rope_theta"])
    shape = _settings(block, config.num_hidden_layers, config.vocab_size, config.max_position_embeddings)
    tensors = {name: tensor for name, tensor in model.state_dict().items()
               if not (config.tie_word_embeddings and name == "lm_head.weight")}
    kind = config.model_type
    named = {_named(name, kind, config.num_hidden_layers): _in_order(name, tensor, kind, block)
             for name, tensor in stored(tensors).items()}
    return write_gguf(file, kind, shape | rope, named | factors, vocabulary, weights)


def _model_refusal(config: Any) -> str:
    own = "; export it with --format huggingface and convert that folder with llama.cpp's convert_hf_to_gguf.py"
    rope = config.rope_parameters or {}
    factors = config.model_type in NEIGHBOURS
    known, own_setting = (gguf_file.BY_FACTORS, "") if factors else (gguf_file.BY_KEYS, gguf_file.unsettled(rope))
    # Gemma calls it hidden_activation.
    activation = getattr(config, "hidden_act", "another function")
    wrong = {
        f"of the architecture {config.model_type}, not one of {', '.join(MODELS)}": config.model_type not in MODELS,
        f"activated by {activation}, not by silu": activation != "silu",
        f"rotated by {rope.get('rope_type')}, which llama.cpp has not for {config.model_type} (it has "
        f"{', '.join(known)})": rope.get("rope_type") not in known,
        f"rotated by yarn with {own_setting}, for which llama.cpp has no place in {config.model_type}":
            bool(own_setting),
        "rotated in part": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "attending within a window": any(kind != "full_attention" for kind in getattr(config, "layer_types", []) or [])}
    found = next((reason for reason, is_wrong in wrong.items() if is_wrong), "")
    return found and f"the format gguf holds no draft language model {found}{own}"


def _settings(block: BlockConfig, layers: int, vocab: int, context: int) -> dict[str, Any]:
    """Shape of Llama's layers under llama.cpp's keys."""
    return {"vocab_size": vocab, "context_length": context, "embedding_length": block.hidden_size,
            "block_count": layers, "feed_forward_length": block.intermediate_size,
            "attention.head_count": block.num_heads, "attention.head_count_kv": block.num_kv_heads,
            "attention.key_length": block.head_dim, "attention.value_length": block.head_dim,
            "attention.layer_norm_rms_epsilon": float(block.norm_eps), "rope.dimension_count": block.head_dim,
            "rope.freq_base": float(block.rope_base)}


def _named(name: str, kind: str, layers: int, pairs: Pairs = ()) -> str:
    """llama.cpp's name of a tensor: what an architecture of its own adds, and what the model that it is made of has."""
    import gguf

    names = gguf.get_tensor_name_map({gguf.MODEL_ARCH_NAMES[one]: one for one in gguf.MODEL_ARCH}[kind], layers)
    found = (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in (name, f"model.{name}"))
    return there(name, pairs) or next(filter(None, found), name)


def _in_order(name: str, tensor: Tensor, kind: str, block: BlockConfig) -> Tensor:
    """A weight, of this name in transformers, with the rows of queries and keys in llama.cpp's order."""
    part = name.split(".")[-2:][0]
    if kind not in NEIGHBOURS or part not in ("q_proj", "k_proj"):
        return tensor
    count = block.num_heads if part == "q_proj" else block.num_kv_heads
    halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _command(drafter: DraftLM | Eagle3 | BlockDraft, places: Places) -> dict[str, str]:
    kind = "draft-simple" if isinstance(drafter, DraftLM) else "draft-eagle3"
    if isinstance(drafter, BlockDraft):
        kind = f"draft-{blocks.KINDS[drafter.config.correction].method}"
    drafts = places.drafts
    # Of blocks those of DSpark alone judge their tokens, by a head of their own.
    judges = not isinstance(drafter, BlockDraft) or drafter.config.confidence
    least = [] if drafts.least is None or not judges else ["--spec-draft-p-min", f"{drafts.least:g}"]
    return {"llama.cpp": shlex.join([
        "llama-server", "-m", places.gguf, "-md", f"{places.folder}/{GGUF_FILE}", "--spec-type", kind,
        "--spec-draft-n-max", str(drafts.chain(drafter)), *least, "-ctk", "f32", "-ctv", "f32", "-fa", "off",
        *(["--lora", f"{places.adapter}.gguf"] if places.rank else [])])}


# Drafters over the target's states ------------------------------------------------------------------------------------


def _write_states(file: Path, drafter: Eagle3 | BlockDraft, target: Target, vocabulary: Path, weights: str) -> Table:
    """Write EAGLE-3 or a drafter of blocks; returns the table of its tensors."""
    block = drafter.block
    settings = {**_settings(block, drafter.num_layers, drafter.vocab_size, target.context_length),
                "target_layers": [tap + 1 for tap in drafter.taps]}
    scaled, length = frequencies(block.rope_base, block.head_dim, block.rope_scaling, torch.device("cpu"))
    if isinstance(drafter, Eagle3):
        kind, like, pairs, mask = EAGLE3, "llama", eagle3.GGUF, None
        tensors = {there(name, eagle3.LAYERS) or name: tensor
                   for name, tensor in third_tensors(drafter, target).items()}
        # llama.cpp takes a whole output layer from the target.
        if borrows_output(drafter):
            del tensors[OUTPUT]
        rope, factors = gguf_file.by_factors(scaled, length, block.rope_base)
        settings |= {"target_hidden_size": drafter.hidden_size,
                     "norm_before_residual": drafter.config.norm_before_residual,
                     "norm_before_fc": drafter.config.norm_before_fc}
    else:
        kind, like, pairs, mask = DFLASH, "qwen3", blocks.GGUF, drafter.config.mask_token_id
        tensors = dflash.block_tensors(drafter, target)
        rope, factors = gguf_file.by_keys({
            "rope_type": "default", "original_max_position_embeddings": target.context_length,
            **(block.rope_scaling or {})}, length), {}
        settings |= {
            "block_size": drafter.block_size, "sample_from_anchor": drafter.config.aligned == "next",
            "attention.causal": drafter.config.causal, "has_confidence_head": drafter.config.confidence,
            **{key: value for key, value in dflash.slot_config(drafter).items()
               if key.startswith(("conv_", "selector_"))}}
    named = {_named(name, like, drafter.num_layers, pairs): _in_order(name, tensor, kind, block)
             for name, tensor in tensors.items() if name != "t2d"}
    if drafter.token_ids_Q is not None:
        # The tokens themselves, where the official layout has offsets.
        named["d2t"] = drafter.token_ids_Q.cpu().long()
    return write_gguf(file, kind, settings | rope, named | factors, vocabulary, weights, mask=mask)


GGUF = ExportFormat[DraftLM | Eagle3 | BlockDraft](
    name="gguf", content="draft language models, EAGLE-3 drafters and drafters of blocks", readers={"llama.cpp": ""},
    families=(DraftLM, Eagle3, BlockDraft), refusal=_refusal, write=export_gguf, option="target_gguf", file=GGUF_FILE,
    weights=WEIGHTS, others=_command,
    lost=lambda drafter: "" if not isinstance(drafter, DraftLM) or drafter.config.depths == 1 else (
        "It was trained to answer several tokens in one pass through mask tokens, which llama.cpp does not do with a "
        "draft model: there it drafts one by one, from tokens alone."),
    # llama.cpp rounds the embedding like any matrix.
    as_read=lambda weight, weights, linear: rounded(weight, weights))
