"""Draft language model as an ordinary Hugging Face folder, which serving engines load as a draft model."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...modules import DraftLM, DraftLMConfig, Target, UserError
from ...modules.families.draft_lm.drafter import SCALE, as_model
from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import read_json, record_of
from ...modules.parts.feature_drafter import columns_for
from .parts.checkpoint import WHOLE, Checkpoint, Contents, Table, TensorForm, as_pickle, stored
from .parts.compressed_tensors import COMPRESSED, as_compressed, compressed, compressed_config
from .parts.export_format import PLAIN, ExportFormat, ExportSettings, ImportSettings, Places, Served, hub_name
from .parts.gguf_file import BFLOAT16, FLOAT32

TRAINED = "draft_token_ids.json"  # The ids of a reduced vocabulary, ascending
_MASK, _DEPTHS = "pard_token", "draftsmith_depths"
"""Keys of the mask token, as engines read it, and of the number of tokens that are guessed in a pass, which they ask
for."""
PROJECTION, PICKLE = "pard_warp_model", "warp_model.bin"
"""Folder of the projection of the target's states (PARD-2), as its training code names it, and the file that its
decoding code reads in place of that."""
_STATES = ("pard2_target_layers", "pard2_target_dim", "pard2_scale", "pard2_proj_bias")
FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
           "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
"""Number formats by their names in safetensors."""
ASSISTED = """transformers decodes with it in Python, in this folder:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}")
draft = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
prompt = tokenizer("What is a draft horse?", return_tensors="pt")
answer = target.generate(**prompt, assistant_model=draft, do_sample=False, max_new_tokens=64)
print(tokenizer.decode(answer[0]))
```"""
"""Lines that decode with it."""


def export_huggingface(drafter: DraftLM, target: Target, folder: Path, settings: ExportSettings = PLAIN) -> Contents:
    """Write a draft language model as config.json, model.safetensors, generation_config.json and tokenizer files.

    The folder holds the target's whole vocabulary, since engines compare ids: a reduced output layer becomes a whole
    one, in which the tokens that the draft never learnt have the mean of the trained rows. A mask token, where there is
    one, has the id `mask_token_id`; the projection of the target's states that its drafts read is a file of its own,
    without which they read tokens alone. Of number formats float32 keeps that of the model. Raises UserError for states
    that transformers has no number for."""
    last, note = target.num_layers - 1, ""
    if drafter.target_proj is not None and last in drafter.taps:
        raise UserError(f"the drafter reads the output of the last layer ({last}), and the layout numbers states as "
                        "transformers does, whose last one is that after the norm; train with other taps, or decode "
                        "the artifact with draftsmith")
    model, weights = as_model(drafter), settings.weights
    if target.model.generation_config is not None:
        model.generation_config = copy.deepcopy(target.model.generation_config)
    # One file, however large: engines read a draft whole.
    model.save_pretrained(folder, max_shard_size="1TB")
    target.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Engines read keys that transformers has renamed, and one of mask tokens, for which it has none.
    config["torch_dtype"] = config.get("dtype") or config.get("torch_dtype")
    rope = config.get("rope_parameters") or {}
    config |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    config |= {} if drafter.config.mask_token_id is None else {_MASK: drafter.config.mask_token_id,
                                                               _DEPTHS: drafter.config.depths}
    if drafter.target_proj is not None and drafter.config.mask_token_id is not None:
        layers = [*(tap - target.num_layers for tap in drafter.taps), -1]
        config |= {"pard2": True, "spd_type": "pard2", **dict(zip(_STATES, (
            layers, drafter.target_proj.in_features, SCALE, False), strict=True))}
        (folder / PROJECTION).mkdir()
        save_file(stored({"target_proj.weight": drafter.target_proj.weight}), folder / PROJECTION / WHOLE,
                  metadata={"format": "pt"})
        note = f"{PROJECTION}/{WHOLE} holds the projection of the target's states; without it drafts read tokens alone."
    embedding = model.get_input_embeddings().weight
    linear = {f"{name}.weight" for name, module in model.named_modules()
              if isinstance(module, nn.Linear) and module.weight is not embedding}
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    # Of tied ones the embedding alone is written.
    if wrong := ({*model.state_dict()} - tied) ^ _forms(folder).keys():
        raise ValueError(f"the export would hold wrong tensors: {', '.join(sorted(wrong))}")
    if weights != FLOAT32:
        held = compressed(load_file(folder / WHOLE), linear, weights)
        save_file(held, folder / WHOLE, metadata={"format": "pt"})
        config |= {**compressed_config(weights, linear), "dtype": BFLOAT16}
    table = _forms(folder)
    write_file(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if drafter.token_ids is not None:
        write_file(folder / TRAINED, json.dumps(drafter.token_ids.tolist()) + "\n")
    # Weights of eight bits transformers reads with another library alone.
    hub = None if target.adapter else hub_name(target.identity.name)
    example = ASSISTED.format(target=hub or Places.merged)
    example = example if weights in (FLOAT32, BFLOAT16) else ""
    if note:
        example = f"{as_pickle('PARD-2', f'{PROJECTION}/{WHOLE}', PICKLE)}\n\n{example}"
    return Contents(title="A draft language model", table=table, note=note, example=example)


def read_huggingface(given: Checkpoint, target: Target, settings: ImportSettings) -> tuple[DraftLM, dict[str, Tensor]]:
    """A draft language model in an ordinary folder, with the vocabulary that it was trained for where it says so.
    Raises UserError if it is none that fits the target, or the tokens that it guesses in a pass are unknown."""
    mask, depths = given.said.get(_MASK), settings.depths or given.said.get(_DEPTHS)
    if mask is None and settings.depths is not None:
        raise UserError(f"depths {settings.depths} counts the guesses of a draft with mask tokens, and {given.config} "
                        f"names none ({_MASK}); leave --depths out")
    if mask is not None and depths is None:
        raise UserError(f"{given.config} names the mask token {mask} ({_MASK}), and not how many tokens the draft "
                        "guesses in a pass; give the number with --depths (PARD was trained with 8)")
    ids, file = None, given.folder / TRAINED
    if file.is_file():
        ids = record_of(list[int], read_json(file, "copy it again"), str(file), "copy it again")
        if not ids or not 0 <= min(ids) <= max(ids) < target.vocab_size:
            raise UserError(f"{file} must hold tokens from 0 to {target.vocab_size - 1}, those of "
                            f"{target.identity.name}; choose a draft made for this target")
    config = DraftLMConfig(folder=str(given.folder), vocabulary_size=None if ids is None else len(ids),
                           depths=depths or 1, mask_token_id=mask)
    taps, projection = _projection(given, target)
    if taps is not None and mask is None:
        raise UserError(f"{given.config} says pard2 and names no mask token ({_MASK}), in front of which the target's "
                        "states are read; copy the folder again")
    drafter = DraftLM.create(replace(config, taps=taps), target, None if ids is None else torch.tensor(ids))
    return drafter, drafter.state_dict() | projection


def _projection(given: Checkpoint, target: Target) -> tuple[tuple[int, ...] | None, dict[str, Tensor]]:
    """(the tapped layers of a draft that reads states, its projection as it is stored here); (None, nothing) for one
    that reads tokens alone. Raises UserError for another version of the layout, or states that this target has not."""
    said, layers = given.said, given.said.get(_STATES[0])
    unknown = sorted(key for key in said if key.startswith("pard2_") and key not in _STATES)
    if said.get("spd_type") not in (None, "pard2") or unknown or (layers is None and said.get("pard2")):
        odd = ", ".join(unknown) or f"spd_type {said.get('spd_type')!r} and pard2_target_layers {layers!r}"
        raise UserError(f"{given.config} has {odd}: it is of another version of PARD-2's layout, of which {_MASK} and "
                        f"{', '.join(_STATES)} are read; convert the draft again with the code that trained it")
    if layers is None:
        return None, {}
    count, (_, wide, scale, bias) = target.num_layers, (said.get(key) for key in _STATES)
    numbers = record_of(list[int], layers, f"{_STATES[0]} of {given.config}", "copy it again")
    # transformers counts the embedding as state 0 and the state after the last norm as that of the last layer.
    states = [(number if number >= 0 else number + count + 1) - 1 for number in numbers]
    if not states or len(set(states)) < len(states) or min(states) < 0 or max(states) >= count or \
            wide != len(states) * target.hidden_size:
        raise UserError(f"{given.config} reads the states {numbers} of {wide} numbers, and {target.identity.name} has "
                        f"{count} layers of {target.hidden_size}; load the target the draft was made for with "
                        "--target.name")
    if bias or not isinstance(scale, float):
        raise UserError(f"{given.config} has pard2_proj_bias {bias!r} and pard2_scale {scale!r}, and a projection "
                        "without a bias and with a scale is read alone; choose such a draft")
    folder = given.folder / PROJECTION
    if not folder.is_dir():
        raise UserError(f"{given.folder} holds no projection of the target's states ({PROJECTION}/{WHOLE}); {PICKLE} "
                        "is a pickle, which is never read: if you trust it, make that folder and convert it with "
                        f"safetensors.torch.save_file(torch.load('{PICKLE}', weights_only=True), "
                        f"'{PROJECTION}/{WHOLE}')")
    tensors = Checkpoint(folder, WHOLE, "config.json", bare=True).tensors()
    weight = tensors.get("target_proj.weight")
    if len(tensors) > 1 or weight is None or weight.dim() != 2 or weight.shape[1] != wide:
        raise UserError(f"{folder} must hold target_proj.weight with {wide} columns alone, it has "
                        f"{ {name: list(one.shape) for name, one in tensors.items()} }; copy it again")
    taps = tuple(sorted(state for state in states if state < count - 1))
    columns = columns_for((*taps, count - 1), weight.float() * (scale / SCALE), states)
    return taps, {"target_proj.weight": columns}


def _forms(folder: Path) -> Table:
    """The tensors of the folder."""
    # The header alone: the tensors are not read again.
    with safe_open(folder / WHOLE, "pt") as opened:
        slices = {name: opened.get_slice(name) for name in [*opened.keys()]}
        return {name: TensorForm(tuple(one.get_shape()), FORMATS[one.get_dtype()]) for name, one in slices.items()}


HUGGINGFACE = ExportFormat(
    name="huggingface", content="draft language models", families=(DraftLM,),
    readers={"transformers": "", "vLLM": "", "SGLang": "", "TensorRT-LLM": ""}, write=export_huggingface,
    read=read_huggingface, opens=("depths",), weights=COMPRESSED, as_read=as_compressed,
    vllm=lambda drafter: Served(loader={}, method={
        "method": "draft_model", **({} if drafter.config.mask_token_id is None else {"parallel_drafting": True})}),
    lost=lambda drafter: "" if drafter.config.depths == 1 or drafter.config.mask_token_id is not None else (
        "It was trained to answer several tokens in one pass through a mask token that has no id and is not in this "
        "folder: here it drafts one by one. Train with `mask_token_id` to export it."))
