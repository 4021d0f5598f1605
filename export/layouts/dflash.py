"""Drafters of blocks in the layouts of DFlash (z-lab, SpecForge) and its corrections, written and read back.

A reduced draft vocabulary, which vLLM reads and the first projects do not know, adds its rows of the target's output
layer, `d2t` and `t2d`. By the confidence of DSpark, the chance of a guess, engines draft less.

Readers differ in what they take for granted: vLLM reads `is_causal`, then `dflash_config.causal`, and otherwise takes
layers with a window for causal and others not; SGLang reads `is_causal` alone; llama.cpp's conversion both, for all
layers. Of a missing `sample_from_anchor` vLLM makes false, SGLang and llama.cpp true. All keys are written, therefore,
at the top, where DeepSpec has them, and in `dflash_config`, where z-lab, SpecForge and ModelOpt do.

Shapes: V target vocabulary, Q entries of the draft vocabulary."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...modules import BlockDraft, BlockDraftConfig, Target, UserError
from ...modules.families.block.corrections import CORRECTIONS, GROUP, TAPS, WIDER, CorrectionName, Markov, Selector
from ...modules.families.block.layout import FIXED, FORMS, KINDS, NAMES, READ
from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import typed
from ...modules.interfaces.layout import here, there
from ...modules.parts.feature_drafter import chosen_taps
from ...modules.target.loading.stored_weights import check_parameters
from ..engine_settings import scheduling
from ..stored_drafter import as_json
from .parts import state_drafters
from .parts.checkpoint import Checkpoint, Contents, check_borrowed, output_bias, stored, write_layout
from .parts.compressed_tensors import OUTPUT, as_compressed, compressed, compressed_config
from .parts.export_format import PLAIN, ExportFormat, ExportSettings, ImportSettings, Served
from .parts.gguf_file import BFLOAT16, FLOAT32
from .parts.state_drafters import EMBEDDING, block_of, check_joined, entries, layer_config, sglang_command

OPENS = ("taps", "aligned", "causal")  # Values that a checkpoint may leave open
TEMPERATURES, _SCALES = "draftsmith_confidence_temperatures", "judge_temperatures_K"
"""By what each step's confidence is divided: a key that engines do not read, and the tensor here."""
WEIGHTS = (FLOAT32, BFLOAT16)  # Number formats of matrices


# Writing --------------------------------------------------------------------------------------------------------------


def export_dflash(drafter: BlockDraft, target: Target, folder: Path, settings: ExportSettings = PLAIN,
                  config: dict[str, Any] | None = None) -> Contents:
    """Write a drafter of blocks as vLLM and SGLang read it, or with the configuration of another layout of the same
    tensors. Raises UserError for fewer bits than those of `WEIGHTS`."""
    if (weights := settings.weights) not in WEIGHTS:
        raise UserError(f"drafters of blocks are written with weights {' or '.join(WEIGHTS)}, got {weights!r}")
    table = write_layout(folder, DFLASH.file, compressed(block_tensors(drafter, target), (), weights),
                         (config or dflash_config(drafter, target)) | compressed_config(weights, ()))
    note, costs = "", settings.drafts.costs
    # TensorRT-LLM reads no layout of the speculators library.
    if drafter.config.confidence and config is None:
        scales = drafter.judge_temperatures_K.tolist()
        # SGLang's `--speculative-dspark-confidence-sts-path` reads the second name.
        files = {"confidence_calibration": {"sts_temperatures": scales, "temperatures": scales}}
        if costs is not None:
            files["confidence_cost_table"] = scheduling(costs, drafter.config.num_steps)
        for name, held in files.items():
            write_file(folder / f"{name}.json", as_json(held))
        paths = ", ".join(f"{name}_path: FOLDER/{name}.json" for name in files)
        note = ("TensorRT-LLM schedules by the drafter's confidence with `speculative_config: {decoding_type: DSpark, "
                f"max_draft_len: {drafter.config.num_steps}, speculative_model: FOLDER, enable_confidence_scheduling: "
                f"true, {paths}}}`, where FOLDER is this folder." + ("" if costs else " It verifies whole blocks "
                "without a table of costs, which an export with --engine_costs has."))
    return Contents(title=f"{KINDS[drafter.config.correction].title} drafter", table=table, note=note)


def block_tensors(drafter: BlockDraft, target: Target) -> dict[str, Tensor]:
    """The tensors of the layout, in float32 on the CPU."""
    ids_Q = drafter.token_ids_Q
    tensors = {there(name, NAMES) or name: tensor for name, tensor in drafter.state_dict().items() if name != _SCALES}
    if ids_Q is None:
        return stored(tensors)
    return stored({**tensors, OUTPUT: target.output_weight()[ids_Q]}) | state_drafters.vocabulary_marks(ids_Q, target)


def block_config(drafter: BlockDraft, target: Target) -> dict[str, Any]:
    """A Qwen3 configuration of the layers, which says whether slots are causal."""
    return {**layer_config(drafter, target), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "layer_types": [state_drafters.SLIDING if drafter.window else "full_attention"] * drafter.num_layers,
            "use_sliding_window": drafter.window is not None, "sliding_window": drafter.window,
            "is_causal": drafter.config.causal}


def slot_config(drafter: BlockDraft) -> dict[str, Any]:
    """The keys of the slots and of the correction, under the names that all of these projects share."""
    config, rank = drafter.config, drafter.config.rank
    said: dict[str, Any] = {"block_size": config.block_size, "mask_token_id": config.mask_token_id,
                            "sample_from_anchor": config.aligned == "next"}
    said |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP} if config.conv else {}
    match drafter.correction, config.correction:
        case Selector(most=most), _:
            said |= {"selector_rank": rank, "selector_top_k": most}
        case _, "refiner":
            said |= {"xpress_rank": rank, "xpress_mlp_hidden": 2 * rank, "xpress_block_size": config.block_size,
                     # As many rounds as tokens make vLLM's guesses those made one by one, as the drafter was trained.
                     "xpress_num_passes": config.num_steps}
        case _, "gru":
            said |= {"projector_type": "domino", "shift_label": said["sample_from_anchor"], "pure_draft_prefix_len": 1,
                     "gru_hidden_dim": WIDER * rank, "emb_dim": rank}
        case Markov(), form:
            said |= {"markov_rank": rank, "markov_head_type": FORMS[form],
                     "enable_confidence_head": config.confidence, "confidence_head_with_markov": config.confidence,
                     **({TEMPERATURES: drafter.judge_temperatures_K.tolist()} if config.confidence else {})}
    return said


def dflash_config(drafter: BlockDraft, target: Target) -> dict[str, Any]:
    """config.json of a drafter of blocks."""
    kind = KINDS[drafter.config.correction]
    said = {**slot_config(drafter), "target_layer_ids": list(drafter.taps)}
    nested = {**said, "causal": drafter.config.causal}
    # SpecForge's name for the correction.
    nested |= {"projector_type": "dspark"} if kind.method == "dspark" else {}
    return {**block_config(drafter, target), "architectures": [kind.architecture],
            "num_target_layers": target.num_layers, "draft_vocab_size": entries(drafter), **said,
            "dflash_config": nested}


def refusal(drafter: BlockDraft, target: Target) -> str:
    """The setting of a drafter of blocks that no engine has, with the remedy; empty where there is none."""
    config = drafter.config
    if config.mask_token_id is None:
        return ("the mask of this drafter is a row of its own, and engines read one of the target's embedding; train "
                "with mask_token_id")
    if (kind := KINDS.get(config.correction)) is None:
        return f"no layout here holds the correction {config.correction}; decode the artifact with draftsmith"
    if config.residual:
        return "no engine adds a state of the text to its slots (residual); decode the artifact with draftsmith"
    if (config.correction == "selector") != config.conv:
        return (f"this drafter has correction {config.correction!r} and conv {str(config.conv).lower()}, and engines "
                "know a selector and convolutions together, as DFlash 2 has them; train with both, or with neither")
    if len(kind.engines) == 1 and drafter.token_ids_Q is not None:
        return f"{kind.engines[0]} has {kind.title} over the whole vocabulary alone; train without vocabulary_size"
    if config.aligned == "next" and config.correction not in (*FORMS, "gru"):
        return (f"this drafter has aligned 'next' and correction {config.correction!r}, and engines draft so with the "
                "corrections of DSpark and Domino alone; train with aligned: same, or with correction: markov")
    return output_bias(target) or ("" if config.correction == "none" else _scaled_logits(target))


def _scaled_logits(target: Target) -> str:
    """The refusal of a target that scales or caps its logits: a correction is added to them here, and in engines and in
    its first projects to what the output layer gives. Empty for any other."""
    # Not on its device: a sketch has no values to compare.
    one = torch.ones(1)
    return "" if torch.equal(target.post_process(one), one) else (
        f"{target.identity.name} scales or caps its logits, which a correction goes before in engines and after here; "
        "train with correction: none")


# Reading --------------------------------------------------------------------------------------------------------------


def read_blocks(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[BlockDraft, dict[str, Tensor]]:
    """DFlash or one of its corrections as DeepSpec, z-lab, SpecForge, ModelOpt or the speculators library write it.
    Raises UserError if a key is missing, no value says which token a slot predicts or what it sees, the mask is a token
    of the target's text or in a file of its own, the taps are no layers of it, or a part is not implemented."""
    said, folder = given.settings, given.folder
    if masks := sorted(folder.glob("mask_embedding.*")):
        raise UserError(f"{masks[0]} holds a mask of its own, and only one that is a row of the target's embedding "
                        "(mask_token_id) can be imported; choose a checkpoint without such a file")
    needed = ["block_size", "mask_token_id", "num_hidden_layers"]
    needed += ["pure_draft_prefix_len"] if said.get("projector_type") == "domino" else []
    if missing := [key for key in needed if said.get(key) is None]:
        raise UserError(f"{given.config} lacks {', '.join(missing)}; copy it again")
    if (layers := said.get("num_target_layers")) not in (None, target.num_layers):
        raise UserError(f"{given.config} says num_target_layers: {layers}, but {target.identity.name} has "
                        f"{target.num_layers}; load the target it was trained for")
    window = state_drafters.window_in(given)
    aligned, causal = _slots(given, said, settings, window)
    taps = chosen_taps(_taps(given, said, target) if settings.taps is None else settings.taps, target)
    tensors, reduced = _own_tensors(given, target)
    check_joined(tensors, taps, target, folder)
    correction, rank = _correction(given, said, tensors, target)
    if reduced is not None and CORRECTIONS[correction].chooses:
        raise UserError(f"{folder} holds a draft vocabulary of {reduced} tokens (d2t), and its {correction} has a row "
                        "for every token of the target; choose a checkpoint without d2t")
    judge_1X, block = tensors.get("confidence.weight"), replace(block_of(given, target, None), qk_norm=True)
    conv = any(".attention_conv." in name for name in tensors)
    # What the configuration says and no file holds would be left out of every guess, unseen.
    held = {"markov_rank": correction in FORMS, "selector_rank": correction == "selector",
            "xpress_rank": correction == "refiner", "conv_kernel_size": conv,
            "enable_confidence_head": judge_1X is not None}
    if gone := [key for key, there in held.items() if said.get(key) and not there]:
        raise UserError(f"{given.config} says {gone[0]}: {json.dumps(said[gone[0]])}, and {folder} holds no tensors of "
                        "it; copy all files of weights again")
    if judge_1X is not None and (correction not in FORMS or judge_1X.shape[-1] != target.hidden_size + rank):
        raise UserError(f"the confidence head in {folder} does not read the token before a guess "
                        "(confidence_head_with_markov), as the one here does; choose a checkpoint with it")
    try:
        if block.hidden_size != target.hidden_size:
            raise UserError(f"its layers are {block.hidden_size} wide (hidden_size), and a drafter of blocks is as "
                            f"wide as its target, {target.hidden_size}; choose another checkpoint")
        config = typed({
            "taps": taps, "num_layers": said["num_hidden_layers"], "block_size": said["block_size"], "aligned": aligned,
            "causal": bool(causal), "correction": correction, "mask_token_id": said["mask_token_id"], "conv": conv,
            "confidence": judge_1X is not None, "vocabulary_size": reduced, "rank": rank, "window": window},
            BlockDraftConfig)
        BlockDraft.fitted(config, target)
        with torch.device("meta"):
            # A configuration can claim any size: no memory is taken for what the files cannot hold.
            sketch = BlockDraft(config, target, block)
    except UserError as error:
        raise UserError(f"{given.config} is not for {target.identity.name}: {error}") from error
    check_parameters(sketch, sum(file.stat().st_size for file in given.files), str(folder))
    drafter = BlockDraft(config, target, block)
    if config.confidence:
        tensors.setdefault("confidence.bias", torch.zeros(1))
        tensors[_SCALES] = torch.tensor(said.get(TEMPERATURES) or [1.0] * config.num_steps)
        if not bool((tensors[_SCALES] > 0).all()):
            raise UserError(f"{given.config} says {TEMPERATURES}: {json.dumps(said[TEMPERATURES])}; all of them divide "
                            "a confidence and must be above 0, copy it again")
    if unknown := sorted(tensors.keys() - drafter.state_dict().keys()):
        titles = ", ".join(dict.fromkeys(kind.title for kind in KINDS.values()))
        raise UserError(f"{folder} holds {there(unknown[0], NAMES) or unknown[0]}, a part that this reader knows of no "
                        f"method; choose a checkpoint of {titles}")
    return drafter, tensors


def _own_tensors(given: Checkpoint, target: Target) -> tuple[dict[str, Tensor], int | None]:
    """(its tensors by their names here, the size of its reduced vocabulary). Raises UserError where a matrix that it
    shares with its target is not the one of this target."""
    tensors, folder, rows_VD = given.tensors(), given.folder, target.output_weight()
    check_borrowed(tensors.pop(EMBEDDING, None), target, folder)
    own_QD = tensors.pop(OUTPUT, None)
    reduced = state_drafters.take_vocabulary(tensors, target, folder)
    check_borrowed(own_QD, target, folder,
                   rows_VD if reduced is None else rows_VD[tensors["token_ids"].to(rows_VD.device)])
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (own := here(name, READ) or name) in found:
            raise UserError(f"{folder} holds {name} twice, under two names; choose a checkpoint with one of them")
        found[own] = tensor
    return found, reduced


def _correction(given: Checkpoint, said: dict[str, Any], tensors: dict[str, Tensor], target: Target
                ) -> tuple[CorrectionName, int]:
    """(the correction whose layers are among the tensors, its rank). Raises UserError where the configuration says
    another one, or the target scales the logits to which it is added."""
    correction, rank = next(((name, tensors[mark].shape[1]) for name, kind in KINDS.items()
                             if (mark := f"correction.{kind.mark}.weight") in tensors), ("none", BlockDraftConfig.rank))
    if correction == "markov":
        correction = {form: name for name, form in FORMS.items()}.get(said.get("markov_head_type") or "", correction)
    domino = said.get("projector_type") == "domino"
    if domino != (correction == "gru"):
        raise UserError(f"{given.config} says projector_type: {json.dumps(said.get('projector_type'))}, and "
                        f"{given.folder} holds {'no' if domino else 'an'} embed_proj.2.weight of domino; copy both "
                        "again")
    if domino:
        given.require({**FIXED, "pure_draft_prefix_len": (1,), "gru_hidden_dim": (WIDER * rank,)}, target)
    if correction != "none" and (reason := _scaled_logits(target)):
        raise UserError(reason)
    return correction, rank


def _slots(given: Checkpoint, said: dict[str, Any], settings: ImportSettings, window: int | None
           ) -> tuple[Literal["next", "same"], bool]:
    """(what a slot predicts, whether it sees those before it alone). Raises UserError where neither checkpoint nor user
    says it: readers that assume either are wrong about every other checkpoint, and merely accept less."""
    kinds = {*(said.get("layer_types") or [state_drafters.SLIDING] * (window is not None))}
    anchor = said.get("sample_from_anchor", said.get("shift_label"))
    if None not in (shift := said.get("shift_label"), anchor) and bool(shift) != bool(anchor):
        raise UserError(f"{given.config} says sample_from_anchor: {json.dumps(anchor)} and shift_label: "
                        f"{json.dumps(shift)}, which contradict each other; correct one of them")
    aligned = settings.aligned or (None if anchor is None else "next" if anchor else "same")
    # vLLM's order; JetSpec has a key of its own. In the speculators library a layer without a window is never causal,
    # one with a window is unless the checkpoint says otherwise; of DFlash 2 it has to say that it is.
    stated = [settings.causal, given.said.get("is_causal"), *(said.get(key) for key in (
        "is_causal", "causal", "causal_head"))]
    trained = {kind == "sliding_attention" and not said.get("sliding_window_non_causal", said.get(
        "speculators_model_type") == "dflash2") for kind in kinds or {"full_attention"}}
    if given.by_speculators and all(one is None for one in stated):
        if len(trained) > 1:
            raise UserError(f"{given.config} has layers with a window, whose slots see those before them alone, and "
                            "layers without, whose slots see all (layer_types); drafters of blocks here have one kind, "
                            "say --causal true or false to draft with that, and compare what is accepted")
        stated += trained
    causal = next((one for one in stated if one is not None), None)
    if aligned is None or causal is None:
        left = [("which token a slot predicts (sample_from_anchor)",
                 "--aligned same as in DFlash, or next as in DSpark"),
                ("whether a slot sees those after it (is_causal)", "--causal false as in both, or true as in JetSpec")]
        what, remedy = zip(*(left if aligned is causal else left[:1] if aligned is None else left[1:]), strict=True)
        raise UserError(f"{given.config} does not say {' and '.join(what)}; give {' and '.join(remedy)}")
    return aligned, causal


def _taps(given: Checkpoint, said: dict[str, Any], target: Target) -> tuple[int, ...]:
    """The layers whose outputs are read; the speculators library counts the states before a layer."""
    if said.get("aux_hidden_state_layer_ids") is not None:
        return tuple(layer - 1 for layer in said["aux_hidden_state_layer_ids"])
    if said.get("target_layer_ids") is None:
        raise UserError(f"{given.config} does not say which layers' outputs are read (target_layer_ids); give them, "
                        f"from 0 to {target.num_layers - 1}, with --taps")
    return tuple(said["target_layer_ids"])


def _passed_over(drafter: BlockDraft) -> list[str]:
    """Engines that have not its method, its reduced vocabulary, or, as TensorRT-LLM, its slots or its window."""
    config, kind, reduced = drafter.config, KINDS[drafter.config.correction], drafter.token_ids_Q is not None
    other_slots = config.causal or (config.aligned == "next") != (config.correction in FORMS)
    return [name for name in DFLASH.readers if name not in kind.engines or (name != "vLLM" and reduced)
            or (name == "TensorRT-LLM" and (other_slots or config.window is not None))]


def served_by_vllm(drafter: BlockDraft) -> Served | None:
    """The settings of vLLM; None for a method that it has not."""
    kind = KINDS[drafter.config.correction]
    return Served(method={"method": kind.method}, loader={}) if "vLLM" in kind.engines else None


DFLASH = ExportFormat[BlockDraft](
    name="dflash", content="drafters of blocks", families=(BlockDraft,), refusal=refusal,
    readers={"vLLM": "", "SGLang": "", "TensorRT-LLM": ""}, passed_over=_passed_over,
    write=export_dflash, read=read_blocks, opens=OPENS, known=FIXED, weights=WEIGHTS, as_read=as_compressed,
    vllm=served_by_vllm, others=lambda drafter, places: {} if served_by_vllm(drafter) else {
        "SGLang": sglang_command("DFLASH", places, num_draft_tokens=drafter.config.block_size)})
