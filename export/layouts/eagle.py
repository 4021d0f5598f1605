"""EAGLE drafters in the layout of the official code (SafeAILab/EAGLE), written and read back.

EAGLE-1: `fc`, `layers.0` without a norm before its attention, `embed_tokens`. EAGLE-3: `fc`, `midlayer`, `norm`,
`lm_head` over the draft vocabulary, whose entry i is token i + d2t[i], and `t2d`, which marks those tokens;
EAGLE-3.1 adds `fc_norm.{i}`, a norm for each tapped state, the speculators library `input_norm`, one over all, P-EAGLE
`mask_hidden`, the masks' state before `fc`. At position p all predict token p + 2. EAGLE-4 has a layout of its own,
whose readers refuse what they do not know: the tensors of EAGLE-3.1 over the whole vocabulary, and its candidate head.

EAGLE-3 stores no embedding, as its official checkpoints: readers take the target's. EAGLE-1 does, since its official
code asks for it. A drafter of another width than the target's has the key `target_hidden_size` and an `embed_tokens` of
its own. The official code reads one layer.

Shapes: V target vocabulary, Q entries of the draft vocabulary."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...modules import Eagle, Eagle3, Eagle3Config, EagleConfig, PEagle, PEagleConfig, Target, UserError
from ...modules.families.eagle3 import layout as third
from ...modules.families.eagle3.layout import LAYERS, MASK_STATE, MASK_TOKENS, NORM, NORMS, STEPS, TWIN
from ...modules.interfaces.layout import here, there
from ...modules.parts.decoder_block import OFFICIAL_ROPE_BASE
from ...modules.parts.feature_drafter import chosen_taps
from .parts import state_drafters
from .parts.checkpoint import WHOLE, Checkpoint, Contents, check_borrowed, output_bias, stored, write_layout
from .parts.compressed_tensors import COMPRESSED, OUTPUT, as_compressed, compressed, compressed_config
from .parts.export_format import PLAIN, ExportFormat, ExportSettings, ImportSettings, Served
from .parts.state_drafters import EMBEDDING, LAYER_IDS, ROPE_BASE, TAPS, eagle_config, linear_names, sglang_command

OPENS = ("taps", "rope_base")  # Values that a checkpoint may leave open
FREQUENCIES = "token_frequency.npy"  # File with the counts of all tokens, next to EAGLE-4's weights


def export_eagle(drafter: Eagle | Eagle3, target: Target, folder: Path, settings: ExportSettings = PLAIN) -> Contents:
    """Write EAGLE-1 or EAGLE-3 as the official code and engines read it; below 16 bits vLLM alone does. Of EAGLE-1 no
    output layer is stored: a reduced draft vocabulary becomes the whole one. Into EAGLE-3's a shared one is copied."""
    weights = settings.weights
    if isinstance(drafter, Eagle):
        # EAGLE-1's official code loads its own embedding; EAGLE-3's readers take the target's.
        tensors = stored({**drafter.state_dict(), EMBEDDING: target.model.get_input_embeddings().weight})
    else:
        tensors = third_tensors(drafter, target)
    linear = linear_names(tensors, drafter)
    table = write_layout(folder, WHOLE, compressed(tensors, linear, weights),
                         eagle_config(drafter, target) | compressed_config(weights, linear))
    outputs, drafts = list(drafter.taps), settings.drafts
    return Contents(title=f"{drafter.card.name.split(',')[0]} drafter", table=table, note=(
        "" if "TensorRT-LLM" in _passed_over(drafter) else
        "TensorRT-LLM (PyTorch backend) takes its settings from a file: `speculative_config: {decoding_type: Eagle3, "
        f"{drafts.tensorrt(drafts.chain(drafter))}, speculative_model: FOLDER, eagle3_layers_to_capture: {outputs}}}`, "
        "where FOLDER is this folder."))


def export_eagle_sglang(drafter: Eagle, target: Target, folder: Path, settings: ExportSettings) -> Contents:
    """Write EAGLE-1 as SGLang reads it, with a bias of zeros where it has none: SGLang would take random numbers."""
    tensors = {"fc.bias": torch.zeros(drafter.block.hidden_size), **stored(drafter.state_dict())}
    config = {**eagle_config(drafter, target), "architectures": ["LlamaForCausalLMEagle"]}
    table = write_layout(folder, WHOLE, tensors, config)
    return Contents(title="EAGLE-1 drafter", table=table)


def refusal(drafter: Eagle | Eagle3, target: Target) -> str:
    """The refusal of a target whose output layer has a bias, and of EAGLE-1 with FSPAD's changes, a window or norms of
    queries and keys; else empty."""
    if isinstance(drafter, Eagle3) or output_bias(target):
        return output_bias(target)
    settings = {"feature_sampling": drafter.config.feature_sampling,
                "partial_alignment": drafter.config.partial_alignment, "qk_norm": drafter.block.qk_norm,
                f"window {drafter.window}": drafter.window is not None}
    changed = " and ".join(name for name, chosen in settings.items() if chosen)
    return changed and (f"this drafter has {changed}, which no layout holds and no serving engine runs; train without "
                        "it to export")


def third_tensors(drafter: Eagle3, target: Target) -> dict[str, Tensor]:
    """EAGLE-3's weights under their official names, in float32 on the CPU, each with memory of its own."""
    # A candidate head makes the output layer cheaper and is no part of the official layout.
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if not name.startswith("head.")}
    own, weight_VD = drafter.lm_head, target.output_weight()
    ids_Q, marks = tensors.pop("token_ids", None), dict[str, Tensor]()
    if isinstance(drafter, PEagle):
        tensors[MASK_STATE] = drafter.mask_hidden[None, None]
    tensors[OUTPUT] = own.weight if own is not None else weight_VD if ids_Q is None else weight_VD[ids_Q]
    if ids_Q is not None:
        marks = state_drafters.vocabulary_marks(ids_Q, target)
    if drafter.num_layers > 1:
        tensors = {there(name, LAYERS) or name: tensor for name, tensor in tensors.items()}
        # vLLM reads one name of this norm, SGLang and TensorRT-LLM the other.
        tensors |= {TWIN.format(layer): tensors[NORM.format(layer)] for layer in range(1, drafter.num_layers)}
    return stored(tensors) | marks


def borrows_output(drafter: Eagle3) -> bool:
    """True if its output layer is the target's whole one, which some engines take from the target."""
    return drafter.lm_head is None and drafter.token_ids_Q is None


def read_eagle(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Eagle | Eagle3, dict[str, Tensor]]:
    """EAGLE-1 or EAGLE-3 in the official layout, or EAGLE-3 in that of the speculators library. Raises UserError if a
    key is missing, the stored embedding is not the target's, or taps or the rotary base are ambiguous."""
    tensors, said, folder = given.tensors(), given.said, given.folder
    block = state_drafters.block_of(given, target, _rope_base(given, settings.rope_base))
    depth = said.get("num_hidden_layers") or 1
    if block.hidden_size == target.hidden_size:
        check_borrowed(tensors.pop(EMBEDDING, None), target, folder)
    # EAGLE-1 has no norm before the output layer; not every configuration names the generation.
    if "norm.weight" in tensors:
        for layer in range(1, depth):
            tensors.pop(TWIN.format(layer), None)
        tensors = {here(name, LAYERS) or name: tensor for name, tensor in tensors.items()}
        reduced = state_drafters.take_vocabulary(tensors, target, folder)
        taps = chosen_taps(_taps(given, target) if settings.taps is None else settings.taps, target)
        state_drafters.check_joined(tensors, taps, target, folder)
        normed = "midlayer.self_attn.q_norm.weight" in tensors
        block, window = replace(block, qk_norm=normed), state_drafters.window_in(given)
        # Steps are of training, and a window must hold them.
        settings_of: dict[str, Any] = {
            "taps": taps, **{name: bool(said.get(name)) for name in NORMS}, "num_layers": depth,
            "hidden_size": said["hidden_size"], "vocabulary_size": reduced, "qk_norm": normed, "window": window,
            "steps": min(Eagle3Config.steps, window or Eagle3Config.steps),
            "output": "shared" if reduced is None and OUTPUT not in tensors else "copy"}
        if MASK_STATE not in tensors:
            return Eagle3(Eagle3Config(**settings_of), target, block), tensors
        # Engines pass over this norm, which nothing reads in a draft of one pass.
        settings_of |= {"norm_output": False, "steps": said.get(STEPS) or PEagleConfig.steps,
                        "mask_token_id": next((said[key] for key in MASK_TOKENS if said.get(key) is not None), None)}
        tensors[MASK_STATE] = tensors[MASK_STATE].flatten()
        return PEagle(PEagleConfig(**settings_of), target, block), tensors
    if depth != 1:
        raise UserError(f"{given.config} says num_hidden_layers: {depth}; EAGLE-1 has 1, choose such a checkpoint")
    if block.hidden_size != target.hidden_size:
        raise UserError(f"{given.config} says target_hidden_size: {said['target_hidden_size']} and hidden_size: "
                        f"{block.hidden_size}; EAGLE-1 is as wide as its target, choose such a checkpoint")
    return Eagle(EagleConfig(bias="fc.bias" in tensors), target, block), tensors


def export_eagle4(drafter: Eagle3, target: Target, folder: Path, settings: ExportSettings = PLAIN) -> Contents:
    """Write EAGLE-4 with the keys and tensors alone that its readers know."""
    tensors = {there(name, LAYERS) or name: tensor for name, tensor in third_tensors(drafter, target).items()}
    tensors |= stored({found: tensor for name, tensor in drafter.state_dict().items()
                       if (found := there(name, third.FACTORS)) is not None})
    chosen = drafter.config
    config = {**state_drafters.layer_config(drafter, target), "architectures": ["LlamaForCausalLMEagle4"],
              "draft_vocab_size": drafter.vocab_size, "eagle_config": {LAYER_IDS: list(drafter.taps)},
              "fc_norm": chosen.fc_norm, "norm_output": chosen.norm_output,
              third.HEAD: {"type": third.KINDS[0], "rank": chosen.head_rank, "num_candidates": chosen.candidates}}
    return Contents(title="EAGLE-4 drafter", table=write_layout(folder, WHOLE, tensors, config))


def _no_eagle4(drafter: Eagle3, target: Target) -> str:
    """The refusal of a drafter that is no EAGLE-4; else empty."""
    config = drafter.config
    wrong = {"has no candidate head; set drafter.head_rank, with train.start": drafter.head is None,
             f"reads {len(drafter.taps)} layers of the target and not three; train with three taps":
                 len(drafter.taps) != 3,
             f"has {drafter.num_layers} layers and not one; train with num_layers: 1": drafter.num_layers != 1,
             "has a reduced vocabulary; train with vocabulary_size: null": drafter.token_ids_Q is not None,
             "is of another width than its target; leave hidden_size out": drafter.embed_tokens is not None,
             "has norms of queries and keys; train with qk_norm: false": drafter.block.qk_norm,
             "has norm_before_fc or norm_before_residual; train with fc_norm and norm_output alone":
                 config.norm_before_fc or config.norm_before_residual}
    return output_bias(target) or next((f"EAGLE-4's layout does not hold this drafter, which {said}"
                                        for said, there in wrong.items() if there), "")


def read_eagle4(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[Eagle3, dict[str, Tensor]]:
    """EAGLE-4. Factors that the file lacks are the truncated SVD of its output layer. Raises UserError for a key that
    is not known, a reduced vocabulary, one factor without the other, or a rank above the width."""
    said = given.said
    for section, known, held in (("", third.KEYS, said), *(
            (f"{name}.", known, said.get(name) or {}) for name, known in third.SECTIONS.items())):
        if unknown := sorted(held.keys() - known):
            raise UserError(f"{given.config} says {section}{unknown[0]}: {json.dumps(held[unknown[0]])}, which is no "
                            "key of EAGLE-4 here; take it out if it changes nothing, or choose another checkpoint")
    inner, head = said["eagle_config"], said[third.HEAD]
    if head["type"] not in third.KINDS:
        raise UserError(f"{given.config} says {third.HEAD}.type: {json.dumps(head['type'])}; only "
                        f"{' and '.join(third.KINDS)} can be imported, choose such a checkpoint")
    if said.get("draft_vocab_size") not in (None, target.vocab_size):
        raise UserError(f"{given.config} says draft_vocab_size: {said['draft_vocab_size']}, but EAGLE-4 guesses all "
                        f"{target.vocab_size} tokens of {target.identity.name}; load the target it was trained for")
    # The ids of this layout count layers by their outputs, from 0, and the base of the rotary embedding is meant.
    said |= {name: inner[name] for name in NORMS if name in inner}
    drafter, tensors = read_eagle(given, target, replace(
        settings, taps=tuple(inner[LAYER_IDS]), rope_base=state_drafters.named_base(said)))
    if not isinstance(drafter, Eagle3) or drafter.token_ids_Q is not None:
        raise UserError(f"{given.folder} holds no norm.weight, or a reduced vocabulary, which EAGLE-4 has not; choose "
                        "another checkpoint, or --format eagle")
    config = replace(drafter.config, head_rank=head["rank"], candidates=head["num_candidates"])
    Eagle3.fitted(config, target)
    found = Eagle3(config, target, drafter.block)
    tensors = {here(name, third.FACTORS) or name: tensor for name, tensor in tensors.items()}
    if found.head is not None and not any(name.startswith("head.") for name in tensors):
        counts_V = None
        if head["type"] == third.KINDS[1]:
            if not (file := given.folder / FREQUENCIES).is_file():
                raise UserError(f"{given.folder} holds neither factors nor {FREQUENCIES}, by which {third.KINDS[1]} "
                                "makes them; copy it again")
            counts_V = torch.from_numpy(np.load(file, allow_pickle=False)).float() + (head.get("smooth_factor") or 0)
            if counts_V.shape != (target.vocab_size,) or not bool(((counts_V >= 0) & counts_V.isfinite()).all()):
                raise UserError(f"{file} must hold a count of each of the {target.vocab_size} tokens of "
                                f"{target.identity.name}; copy it again")
        found.head.factorise(tensors.get(OUTPUT, target.output_weight().cpu()), counts_V)
        tensors |= {f"head.{name}": tensor for name, tensor in found.head.state_dict().items()}
    return found, tensors


def _taps(given: Checkpoint, target: Target) -> tuple[int, ...]:
    """The layers whose outputs are read. Published lists start with 2 and mean inputs, or with 1 and mean outputs."""
    if TAPS in given.said:
        return tuple(given.said[TAPS])
    if LAYER_IDS in given.said:
        return tuple(layer - 1 for layer in given.said[LAYER_IDS])
    ids, usual = (given.said.get("eagle_config") or {}).get(LAYER_IDS), json.dumps(chosen_taps(None, target))
    if ids is None:
        raise UserError(f"{given.config} does not say which layers' outputs EAGLE-3 reads; give them, from 0, with "
                        f"--taps: '{usual}' in the official code and in vLLM for the {target.num_layers} layers of "
                        f"{target.identity.name}")
    if not ids or ids[0] not in (1, 2):
        raise UserError(f"{given.config} names the layers {ids}, but does not say whether their inputs or outputs are "
                        f"read; give the layers whose outputs are read, from 0, with --taps: '{json.dumps(ids)}' for "
                        f"outputs, '{json.dumps([layer - 1 for layer in ids])}' for inputs")
    return tuple(layer - ids[0] + 1 for layer in ids)


def _rope_base(given: Checkpoint, rope_base: float | None) -> float | None:
    """The rotary base that was given, None for the configuration's. Raises UserError where that cannot be believed."""
    # The official trainers rotate with their own base, whatever the configuration says; engines follow it. Files of
    # the speculators library and of this project mean what they say.
    named = state_drafters.named_base(given.said)
    if rope_base is None and named != OFFICIAL_ROPE_BASE and not given.by_speculators and ROPE_BASE not in given.said:
        raise UserError(f"{given.config} says rope_theta: {named:g}, which the official trainers of EAGLE pass over; "
                        f"give --rope_base {OFFICIAL_ROPE_BASE:g} for a checkpoint of theirs, or --rope_base {named:g} "
                        "for one of another trainer, such as SpecForge")
    return rope_base


def _passed_over(drafter: Eagle | Eagle3) -> list[str]:
    """Engines that know EAGLE-1 in another layout alone, pass over `fc` where one layer is read, or have no norms of
    queries and keys, no window, or no P-EAGLE. The window of SGLang is an option of its server."""
    if isinstance(drafter, PEagle):
        return ["the official code", "SGLang", "TensorRT-LLM"]
    others, normed = isinstance(drafter, Eagle) or len(drafter.taps) == 1, drafter.block.qk_norm
    unable = {"SGLang": others or normed, "TensorRT-LLM": others or normed or drafter.window is not None,
              "the official code": normed or drafter.window is not None}
    return [name for name, passes in unable.items() if passes]


def _lost(drafter: Eagle | Eagle3) -> str:
    """The part that engines leave out: a bias, the one layer that is read, or a norm."""
    if isinstance(drafter, Eagle):
        return ("vLLM drops `fc.bias`, which this drafter was trained with, and then accepts hardly a draft; train "
                "with `bias: false` for it.") if drafter.config.bias else ""
    if isinstance(drafter, PEagle):
        return ""
    if drafter.block.qk_norm:
        return ("vLLM alone knows `qk_norm`: SGLang, TensorRT-LLM and the official code pass over these norms and then "
                "accept hardly a draft; train with `qk_norm: false` for them.")
    if len(drafter.taps) == 1:
        return "SGLang and TensorRT-LLM pass over `fc` where one layer is read: serve it with vLLM."
    return "" if not drafter.config.norm_before_residual else (
        "SGLang and TensorRT-LLM do not know `norm_before_residual`, and accept less: serve it with vLLM, or train "
        "without it.")


EAGLE = ExportFormat[Eagle | Eagle3](
    name="eagle", content="EAGLE drafters",
    readers={"the official code": "", "vLLM": "", "SGLang": "", "TensorRT-LLM": ""}, passed_over=_passed_over,
    families=(Eagle, Eagle3, PEagle), refusal=refusal, write=export_eagle, read=read_eagle, opens=OPENS,
    known=third.FIXED,
    weights=COMPRESSED,
    # For vLLM P-EAGLE is EAGLE-3 that drafts in one pass.
    as_read=as_compressed, vllm=lambda drafter: Served(loader={}, method={
        "method": "eagle3", "parallel_drafting": True} if isinstance(drafter, PEagle) else {"method": drafter.family}),
    others=lambda drafter, places: {} if "SGLang" in _passed_over(drafter) else {
        # SGLang counts the tokens before one, and takes them from its command line alone.
        "SGLang": sglang_command("EAGLE3", places, **places.drafts.sglang(3, 1, 4), **(
            {} if drafter.window is None else {"draft_window_size": drafter.window - 1}))},
    lost=_lost)
EAGLE4 = ExportFormat[Eagle3](
    name="eagle4", content="EAGLE-4 drafters", readers={"TokenSpeed": ""}, families=(Eagle3,), refusal=_no_eagle4,
    write=export_eagle4, read=read_eagle4, known=third.FOURTH)
EAGLE_SGLANG = ExportFormat(
    name="eagle-sglang", content="EAGLE-1 drafters", readers={"SGLang": ""}, families=(Eagle,), refusal=refusal,
    write=export_eagle_sglang,
    others=lambda drafter, places: {
        "SGLang": sglang_command("EAGLE", places, **places.drafts.sglang(3, 4, 16))})
