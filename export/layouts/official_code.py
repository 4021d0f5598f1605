"""Drafters in the layouts of their official code, which no engine reads: written and read back.

Hydra heads (zankner/Hydra). Kangaroo adapters (Equationliu/Kangaroo): `layers.0` is a Llama layer without its MLP,
`norm` the norm before the target's output layer, which is not stored; the official code takes the exit layer on its
command line, here config.json has it in a key of its own, with gamma and eta; the state at position p predicts token
p + 1. Prompt tokens (hmarkc/parallel-prompt-decoding): a prompt-tuning adapter of the PEFT library,
`prompt_embeddings` [K C, D], row k C + c for copy c of token k, and adapter_config.json; trees are not part of that
layout: in the official code they are Python source.

Shapes: D hidden size, V target vocabulary, E head dimension."""

from pathlib import Path

import torch
from torch import Tensor

from ...modules import Hydra, HydraConfig, Kangaroo, KangarooConfig, PromptTokens, PromptTokensConfig, Target, UserError
from ...modules.families.hydra.layout import BLOCK, DROPOUT, EMBEDDING, FIRST, FIXED, PLAIN, UNUSED
from ...modules.interfaces.layout import there
from ...modules.parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig
from ...modules.target.draft_vocabulary import over_all_tokens
from .parts import checkpoint
from .parts.checkpoint import WHOLE, Checkpoint, Contents, check_borrowed, output_bias, own_names, stored, write_layout
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings, target_name

HYDRA_FILE = "hydra_lm_head.safetensors"  # The official code reads the same tensors from hydra_lm_head.pt
_EXIT, _GAMMA, _ETA = "draftsmith_exit_layer", "draftsmith_gamma", "draftsmith_eta"
PPD_FILE, PPD_CONFIG, _PROMPTS = "adapter_model.safetensors", "adapter_config.json", "prompt_embeddings"
_PLAIN = {"vt_attention_type": "ensemble", "aggregation_type": "mean", "num_exits": 1, "use_custom_lm_head": False,
          "use_prefix_tuning": False}
"""Settings of the official code of prompt tokens that are the only ones here."""


# Hydra ----------------------------------------------------------------------------------------------------------------


def export_hydra(drafter: Hydra, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write Hydra heads as the official code stores them, an output layer of all heads once for each. A reduced draft
    vocabulary becomes the whole one: of own layers the other tokens get rows that never win (`over_all_tokens`)."""
    state, config = drafter.state_dict(), drafter.config
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith("outputs.")}
    if config.tie_blocks:
        tensors = checkpoint.repeated(tensors, BLOCK, FIRST, config.num_layers - 1)
    for step in range(config.num_heads):
        # A borrowed output layer is the target's, which may have no bias: the official one always has.
        weight_VD, bias_V = target.output_weight(), target.head.bias
        output = (weight_VD, bias_V if isinstance(bias_V, Tensor) else weight_VD.new_zeros(len(weight_VD)))
        if own := drafter.output_parameters(step):
            output = (over_all_tokens(own[0], drafter.token_ids_Q, drafter.vocab_size),
                      over_all_tokens(own[1], drafter.token_ids_Q, drafter.vocab_size))
        tensors[f"outputs.{step}.weight"], tensors[f"outputs.{step}.bias"] = output
    pairs, embedding_VD = DROPOUT if config.prefix else PLAIN, target.model.get_input_embeddings().weight
    named = {there(name, pairs) or name: tensor for name, tensor in tensors.items()} | {EMBEDDING: embedding_VD}
    if drafter.block is not None:
        half = torch.arange(drafter.block.head_dim // 2, dtype=torch.float32)
        named |= dict(zip(UNUSED, (embedding_VD, OFFICIAL_ROPE_BASE ** (-2 * half / drafter.block.head_dim)),
                          strict=True))
    said = {"base_model_name_or_path": target_name(target), "grounded_heads": True, "hidden_state_offset": 0,
            "hydra_head_arch": "prefix-mlp" if config.prefix else "mlp", "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.num_layers}
    return Contents(title="Hydra heads", table=write_layout(folder, HYDRA_FILE, stored(named), said),
                    example=checkpoint.as_pickle("zankner/Hydra", HYDRA_FILE, "hydra_lm_head.pt"))


def _hydra_refusal(drafter: Hydra, target: Target) -> str:
    """The refusal of heads whose later blocks differ, or whose prefix layer has a window or heads of another width;
    else empty."""
    if drafter.config.window is not None:
        return _no_window(drafter.config.window)
    if drafter.config.tie_blocks or drafter.config.num_layers <= 2:
        return "" if drafter.block is None else checkpoint.head_width(drafter.block)
    return (f"the layout holds one block after the first, applied repeatedly; these heads have "
            f"{drafter.config.num_layers - 1}: train with tie_blocks: true")


def _no_window(window: int) -> str:
    return f"the official code has no window, this drafter one of {window} tokens; train without window to export"


def read_hydra(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Hydra, dict[str, Tensor]]:
    """Hydra or Hydra++ heads, counted in the weights as their blocks are; equal blocks after the first become one
    (`tie_blocks`). Raises UserError if a tensor is unknown, or the embedding next to the heads is not the target's."""
    tensors = given.tensors()
    check_borrowed(tensors.pop(EMBEDDING, None), target, given.folder)
    for name in UNUSED:
        tensors.pop(name, None)
    if not any(name.startswith("hydra_mlp.") for name in tensors):
        raise UserError(f"{given.folder} holds no tensor hydra_mlp.*; give a folder with Hydra heads")
    plain = any(name.startswith("hydra_mlp.0.0.") for name in tensors)
    state = own_names(tensors, PLAIN if plain else DROPOUT, given, "Hydra heads")
    heads = [name.split(".") for name in state if name.startswith("heads.")]
    depth = 1 + max((1 + int(parts[3]) for parts in heads if parts[2] == "blocks"), default=0)
    shared = checkpoint.tied(state, BLOCK, FIRST)
    prefix = {name: tensor for name, tensor in state.items() if name.startswith("prefix.")}
    config = HydraConfig(num_heads=1 + max(int(parts[1]) for parts in heads), num_layers=depth,
                         tie_blocks=depth < 3 or shared is not None, prefix=bool(prefix),
                         output="copy" if any(name.startswith("outputs.") for name in state) else "shared")
    return (Hydra(config, target, _prefix_block(prefix, target) if prefix else None),
            shared if config.tie_blocks and shared is not None else state)


def _prefix_block(prefix: dict[str, Tensor], target: Target) -> BlockConfig:
    """The shape of the prefix layer, read from its tensors, with as many attention heads as the target has."""
    like = BlockConfig.like(target)
    sizes = {name: prefix[f"prefix.block.{name}.weight"].shape[0] for name in
             ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj") if f"prefix.block.{name}.weight" in prefix}
    if len(sizes) < 3:
        return like
    queries, keys, width = sizes.values()
    head_dim = max(2, queries // like.num_heads)
    return BlockConfig(hidden_size=like.hidden_size, intermediate_size=width, num_heads=like.num_heads,
                       num_kv_heads=max(1, keys // head_dim), head_dim=head_dim, norm_eps=like.norm_eps)


HYDRA = ExportFormat(name="hydra", content="Hydra heads", readers={"the official code": ""}, families=(Hydra,),
                     refusal=_hydra_refusal, write=export_hydra, read=read_hydra, known=FIXED, file=HYDRA_FILE,
                     bare=True)


# Kangaroo -------------------------------------------------------------------------------------------------------------


def export_kangaroo(drafter: Kangaroo, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write a Kangaroo adapter as the official code reads it; a reduced draft vocabulary becomes the whole one."""
    block, limits = drafter.block, drafter.config
    config = {"model_type": "llama", "hidden_size": block.hidden_size, "intermediate_size": block.intermediate_size,
              "num_attention_heads": block.num_heads, "num_key_value_heads": block.num_kv_heads,
              "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": block.norm_eps,
              "vocab_size": drafter.vocab_size, "max_position_embeddings": target.context_length,
              "pad_token_id": target.config.pad_token_id,
              # The official code takes these on its command line: keys of our own, for reading them back.
              _EXIT: drafter.exit_layer, _GAMMA: limits.gamma, _ETA: limits.eta}
    return Contents(
        title="Kangaroo adapter", table=write_layout(folder, WHOLE, stored(drafter.state_dict()), config),
        example=checkpoint.as_pickle("Equationliu/Kangaroo", WHOLE, "pytorch_model.bin"),
        note=f"The official code takes it with `--exitlayer {drafter.exit_layer} --threshold {limits.eta} "
             f"--steps {limits.gamma}`.")


def _kangaroo_refusal(drafter: Kangaroo, target: Target) -> str:
    """The refusal of an adapter whose attention or output layer is not the official code's; empty for any other."""
    block = drafter.block
    if block.rope_base != OFFICIAL_ROPE_BASE or block.rope_scaling is not None:
        scaled = "" if block.rope_scaling is None else f" and {block.rope_scaling['rope_type']} scaling"
        return (f"the official code rotates with the base {OFFICIAL_ROPE_BASE:g}, this adapter with "
                f"{block.rope_base:g}{scaled}; train with rope_base: {OFFICIAL_ROPE_BASE:g} to export")
    if block.qk_norm or drafter.window is not None:
        return _no_window(drafter.window) if drafter.window else (
            "the official code has no norms of queries and keys; train without qk_norm to export")
    return checkpoint.head_width(block) or output_bias(target)


def read_kangaroo(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Kangaroo, dict[str, Tensor]]:
    """A Kangaroo adapter. Raises UserError if the exit layer is unknown or too deep."""
    config = given.said
    exit_layer = config.get(_EXIT) if settings.exit_layer is None else settings.exit_layer
    if exit_layer is None:
        raise UserError(f"{given.config} does not say after which layer of the target the adapter comes; give it with "
                        "--exit_layer (the official checkpoints have 2 for 7B and 3 for 13B targets)")
    heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
    block = BlockConfig(hidden_size=width, intermediate_size=int(config["intermediate_size"]), num_heads=heads,
                        num_kv_heads=int(config.get("num_key_value_heads") or heads), head_dim=width // heads,
                        norm_eps=float(config["rms_norm_eps"]))
    limits = {name: config[key] for name, key in (("gamma", _GAMMA), ("eta", _ETA)) if key in config}
    fitted, _ = Kangaroo.fitted(KangarooConfig(exit_layer=exit_layer, **limits), target)
    return Kangaroo(fitted, target, block), given.tensors()


KANGAROO = ExportFormat(name="kangaroo", content="Kangaroo adapters", families=(Kangaroo,),
                        readers={"the official code": ""}, refusal=_kangaroo_refusal, write=export_kangaroo,
                        read=read_kangaroo, opens=("exit_layer",))


# Prompt tokens --------------------------------------------------------------------------------------------------------


def export_ppd(drafter: PromptTokens, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write prompt tokens as the official code reads them; a reduced draft vocabulary becomes the whole one."""
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": target_name(target), "inference_mode": True,
              "num_special_tokens": drafter.config.num_tokens, "virtual_tokens_per_special_token": drafter.copies,
              "num_virtual_tokens": drafter.virtual_nodes, "token_dim": drafter.hidden_size, **_PLAIN}
    return Contents(title="Prompt tokens", table=write_layout(folder, PPD_FILE, stored({_PROMPTS: drafter.prompts}),
                                                              config, config_file=PPD_CONFIG))


def read_ppd(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[PromptTokens, dict[str, Tensor]]:
    """Prompt tokens. Raises UserError if their number is missing."""
    steps, copies = given.said.get("num_special_tokens"), given.said.get("virtual_tokens_per_special_token")
    if not (isinstance(steps, int) and isinstance(copies, int) and min(steps, copies) > 0):
        raise UserError(f"{given.config} must hold num_special_tokens and virtual_tokens_per_special_token, whole "
                        f"numbers of at least 1, got {steps} and {copies}; copy it again")
    drafter = PromptTokens(PromptTokensConfig(num_tokens=steps, copies=copies), target)
    own = {("prompts" if name == _PROMPTS else name): tensor for name, tensor in given.tensors().items()}
    # The layout counts no guesses.
    return drafter, {**own, "rank_chances_KR": drafter.rank_chances_KR}


PPD = ExportFormat(name="ppd", content="prompt tokens", readers={"the official code": ""}, families=(PromptTokens,),
                   write=export_ppd, read=read_ppd, known={name: (value,) for name, value in _PLAIN.items()},
                   file=PPD_FILE, config_file=PPD_CONFIG, lost=lambda drafter: "" if drafter.copies == 1 else (
                       f"The official code decodes with one copy of each token; these have {drafter.copies}."))
