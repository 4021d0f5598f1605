"""Kangaroo adapters in the layout of the official code (Equationliu/Kangaroo), written and read back.

`layers.0` is a Llama layer without its MLP, `norm` the norm before the target's output layer, which is not stored. The
official code takes the exit layer on its command line; here config.json has it in a key of its own, with gamma and eta.
The state at position p predicts token p + 1.
"""

from pathlib import Path

from torch import Tensor

from ...modules import Kangaroo, KangarooConfig, Target, UserError
from ...modules.parts.decoder_block import OFFICIAL_ROPE_BASE, BlockConfig
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings
from .parts.head_blocks import head_width, output_bias
from .parts.layout_folder import Contents, as_pickle, stored, write_layout
from .parts.safetensors_reader import Checkpoint

KANGAROO_FILE = "model.safetensors"  # The official code reads the same tensors from pytorch_model.bin
_EXIT, _GAMMA, _ETA = "draftsmith_exit_layer", "draftsmith_gamma", "draftsmith_eta"


def export_kangaroo(drafter: Kangaroo, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write a Kangaroo adapter as the official code reads it; a reduced draft vocabulary becomes the whole one."""
    block = drafter.block
    config = {
        "model_type": "llama",
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": block.norm_eps,
        "vocab_size": drafter.vocab_size,
        "max_position_embeddings": target.context_length,
        "pad_token_id": target.config.pad_token_id,
        # The official code takes these on its command line: keys of our own, for reading them back.
        _EXIT: drafter.exit_layer,
        _GAMMA: drafter.config.gamma,
        _ETA: drafter.config.eta,
    }
    table = write_layout(folder, KANGAROO_FILE, stored(drafter.state_dict()), config)
    return Contents(
        title="Kangaroo adapter", table=table, example=as_pickle("Equationliu/Kangaroo", KANGAROO_FILE,
                                                                 "pytorch_model.bin"),
        note=f"The official code takes it with `--exitlayer {drafter.exit_layer} --threshold {drafter.config.eta} "
             f"--steps {drafter.config.gamma}`.")


def _refusal(drafter: Kangaroo, target: Target) -> str:
    """The refusal of an adapter whose attention or output layer is not the official code's; empty for any other."""
    block = drafter.block
    if block.rope_base != OFFICIAL_ROPE_BASE or block.rope_scaling is not None:
        scaled = "" if block.rope_scaling is None else f" and {block.rope_scaling['rope_type']} scaling"
        return (f"the official code rotates with the base {OFFICIAL_ROPE_BASE:g}, this adapter with "
                f"{block.rope_base:g}{scaled}; train with rope_base: {OFFICIAL_ROPE_BASE:g} to export")
    return head_width(block) or output_bias(target)


def read_kangaroo(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Kangaroo, dict[str, Tensor]]:
    """A Kangaroo adapter in the official layout.

    Raises:
        UserError: if the exit layer is unknown or too deep.
    """
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
                        readers={"the official code": ""}, refusal=_refusal, write=export_kangaroo,
                        read=read_kangaroo, opens=("exit_layer",), file=KANGAROO_FILE)
