"""EAGLE-3 in the layout of the speculators library (vllm-project/speculators 0.9), which vLLM serves as a model.

The tensors are those of the official layout with `layers.0` in place of `midlayer`, without the target's output layer:
where the file has none, vLLM and the library take it from the target. config.json names the target, so
that vLLM finds it, and holds the shape of the layers as a Llama configuration of its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ...modules import Eagle3, Target
from ..artifact import portable
from .eagle import EAGLE, EAGLE_FILE, borrows_output, renamed, third_tensors
from .parts.compressed_tensors import (
    OUTPUT,
    compressed,
    compressed_config,
    compressed_note,
    compressed_table,
)
from .parts.eagle_folder import FIRST, MIDLAYER, NORMS, entries, layer_config, linear_names, tapped, third_table, twin
from .parts.export_format import ExportFormat, ExportSettings
from .parts.layout_folder import Contents, write_layout

VERSION = "0.9.0"
"""The version of the library whose layout this is."""
_TOKENS = 3
"""Tokens of a draft where the server is not given a number."""


def export_speculators(drafter: Eagle3, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write an EAGLE-3 drafter as vLLM and the speculators library read it; arguments as of `export_eagle`."""
    weights = settings.weights
    # The official layout has a second name of some norms for other engines; the library takes the target's output.
    left_out = {twin(layer) for layer in range(1, drafter.num_layers)}
    left_out |= {OUTPUT} if borrows_output(drafter) else set()
    tensors = {renamed(name, MIDLAYER, FIRST): tensor for name, tensor in third_tensors(drafter, target).items()
               if name not in left_out}
    table = {renamed(name, MIDLAYER, FIRST): form for name, form in third_table(drafter).items()
             if name not in left_out}
    linear = linear_names(table, drafter)
    held = compressed_table(table, linear, weights)
    write_layout(folder, EAGLE_FILE, compressed(tensors, linear, weights), held,
                 _config(drafter, target) | compressed_config(weights, linear))
    name, width = portable(target.identity.name), drafter.block.hidden_size
    other = "" if width == drafter.hidden_size else (
        f" The library itself loads drafters of the target's width alone, this one is {width} wide.")
    return Contents(title="EAGLE-3 drafter", table=held, paragraphs=(
        f"In the layout of the speculators library {VERSION}. vLLM also serves the folder as a model of its own and "
        "then takes the target from `speculators_config.verifier.name_or_path` in config.json, a name on the Hub or a "
        f"folder: `{name}`.{other}",
        *compressed_note(weights, linear), "The artifact's tree is not part of it."))


def _config(drafter: Eagle3, target: Target) -> dict[str, Any]:
    # A model_type at the top level would hide the layout from vLLM.
    rope = {"rope_type": "default", **(drafter.block.rope_scaling or {}), "rope_theta": drafter.block.rope_base}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": entries(drafter),
        **{name: getattr(drafter.config, name) for name in NORMS},
        **tapped(drafter),
        "embed_requires_grad": drafter.embed_tokens is not None,
        "tie_word_embeddings": False,
        # vLLM reads the number of tapped layers from the inner configuration.
        "transformer_layer_config": {**layer_config(drafter, target), "rope_parameters": rope,
                                     "num_aux_hidden_states": len(drafter.taps)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _TOKENS, "verifier_accept_k": 1,
                                  "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": portable(target.identity.name),
                         "architectures": list(target.config.architectures or [])},
        },
    }


SPECULATORS = replace(
    cast(ExportFormat[Any], EAGLE), name="speculators", content="EAGLE-3 drafters", families=(Eagle3,),
    readers="vLLM, as a model of its own; the speculators library", write=export_speculators,
    others=lambda drafter, places: {},
)
