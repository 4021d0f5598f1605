"""EAGLE-3, DFlash and DSpark in the layout of the speculators library (vllm-project/speculators 0.9), which vLLM serves
as a model.

The tensors are those of the official layouts, of EAGLE-3 with `layers.0` in place of `midlayer`, without the target's
output layer: where the file has none, vLLM and the library take it from the target. config.json names the target, so
that vLLM finds it, and holds the shape of the layers as a configuration of its own. vLLM starts from that one: in it
stands whether slots of a block are causal, since for the library layers without a window never are, and vLLM makes of
`sliding_window_non_causal` a rule for all layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ...modules import BlockDraft, Eagle3, PEagle, Target
from ...modules.families.block import layout as block
from ...modules.families.eagle3.layout import LAYERS, MASK_TOKENS, NORMS, STEPS, TWIN
from ...modules.interfaces.layout import there
from . import dflash, eagle
from .eagle import EAGLE, OPENS, borrows_output, read_eagle, third_tensors
from .parts.checkpoint import WHOLE, Checkpoint, Contents, write_layout
from .parts.compressed_tensors import OUTPUT, compressed, compressed_config
from .parts.export_format import ExportFormat, ExportSettings, ImportSettings, target_name
from .parts.state_drafters import entries, layer_config, linear_names, tapped

VERSION = "0.9.0"  # The version of the library whose layout this is
_TOKENS = 3  # Tokens of a draft where the server is not given a number


def export_speculators(drafter: Eagle3 | BlockDraft, target: Target, folder: Path,
                       settings: ExportSettings) -> Contents:
    """Write EAGLE-3 or a drafter of blocks as vLLM and the speculators library read it."""
    if isinstance(drafter, BlockDraft):
        return dflash.export_dflash(drafter, target, folder, settings, _config(drafter, target))
    weights = settings.weights
    # The official layout has a second name of some norms for other engines; the library takes the target's output.
    left_out = {TWIN.format(layer) for layer in range(1, drafter.num_layers)}
    left_out |= {OUTPUT} if borrows_output(drafter) else set()
    tensors = {there(name, LAYERS) or name: tensor for name, tensor in third_tensors(drafter, target).items()
               if name not in left_out}
    linear = linear_names(tensors, drafter)
    table = write_layout(folder, WHOLE, compressed(tensors, linear, weights),
                         _config(drafter, target) | compressed_config(weights, linear))
    return Contents(title=f"{drafter.card.name.split(',')[0]} drafter", table=table)


def _config(drafter: Eagle3 | BlockDraft, target: Target) -> dict[str, Any]:
    """config.json; a model_type at its top level would hide the layout from vLLM."""
    if isinstance(drafter, BlockDraft):
        kind, tokens = block.KINDS[drafter.config.correction], drafter.config.num_steps
        # Of DSpark the library has a name of its own.
        model = kind.architecture.replace("Qwen3", "").replace("SparkModel", "SparkDraftModel")
        name, layers = kind.library, dflash.block_config(drafter, target)
        own = {**dflash.slot_config(drafter), "aux_hidden_state_layer_ids": [tap + 1 for tap in drafter.taps],
               "sliding_window_non_causal": not drafter.config.causal}
        further: dict[str, Any] = {}
    else:
        model, name, tokens, layers = "Eagle3DraftModel", "eagle3", _TOKENS, layer_config(drafter, target)
        own = {**{norm: getattr(drafter.config, norm) for norm in NORMS}, **tapped(drafter),
               "embed_requires_grad": drafter.embed_tokens is not None}
        # vLLM reads the number of tapped layers from the inner configuration.
        further = {"num_aux_hidden_states": len(drafter.taps)}
        if isinstance(drafter, PEagle):
            model, name, tokens = "PEagleDraftModel", "peagle", drafter.config.steps
            own |= {MASK_TOKENS[0]: drafter.config.mask_token_id, STEPS: tokens}
            # Of its norms vLLM takes this one from the inner configuration alone.
            further |= {"fc_norm": drafter.config.fc_norm}
    rope = {"rope_type": "default", **(drafter.block.rope_scaling or {}), "rope_theta": drafter.block.rope_base}
    # The section with the target has the number of tokens that vLLM drafts where it is not given one.
    return {
        "architectures": [model], "speculators_model_type": name, "speculators_version": VERSION,
        "draft_vocab_size": entries(drafter), **own, "tie_word_embeddings": False,
        "transformer_layer_config": {**layers, "rope_parameters": rope, **further},
        "speculators_config": {
            "algorithm": str(name), "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1,
                                  "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_name(target),
                         "architectures": list(target.config.architectures or [])}}}


def _refusal(drafter: Eagle3 | BlockDraft, target: Target) -> str:
    """The refusal of a drafter that the library does not know, or no engine; empty for any other."""
    if not isinstance(drafter, BlockDraft):
        return eagle.refusal(drafter, target)
    kind = block.KINDS.get(drafter.config.correction)
    return dflash.refusal(drafter, target) or ("" if kind is None or kind.library else (
        f"the speculators library has no {kind.title}; train another"))


def read_speculators(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Any, dict[str, Tensor]]:
    """The drafter of a checkpoint of the library, by its kind. Raises UserError as the readers of the kinds do."""
    blocks = given.said.get("speculators_model_type") in {kind.library for kind in block.KINDS.values()}
    given.require(block.FIXED if blocks else EAGLE.known, target)
    return (dflash.read_blocks if blocks else read_eagle)(given, target, settings)


SPECULATORS = replace(
    cast(ExportFormat[Any], EAGLE), name="speculators", content="EAGLE-3 drafters and drafters of blocks",
    families=(Eagle3, PEagle, BlockDraft), readers={"vLLM": " as a model of its own", "the speculators library": ""},
    write=export_speculators, read=read_speculators, opens=(*OPENS, "aligned", "causal"),
    known={"is_causal": (None, False, True),
           "speculators_model_type": (None, "eagle3", "peagle", "dflash", "dspark", "dflash2")},
    # The library loads drafters of the target's width alone.
    passed_over=lambda drafter: ["the speculators library"] * (drafter.block.hidden_size != drafter.hidden_size),
    others=lambda drafter, places: {}, refusal=_refusal, lost=lambda drafter: "",
    vllm=lambda drafter: (served := dflash.served_by_vllm(drafter) if isinstance(drafter, BlockDraft) else
                          EAGLE.vllm(drafter)) and replace(served, names_target=True))
