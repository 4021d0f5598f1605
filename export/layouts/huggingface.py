"""Draft language model as an ordinary Hugging Face folder, which serving engines load as a draft model."""

import copy
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...modules import DraftLM, DraftLMConfig, Target, UserError
from ...modules.families.draft_lm.drafter import as_model
from ...modules.files.atomic_files import write_file
from ...modules.files.json_records import read_json, record_of
from .parts.checkpoint import WHOLE, Checkpoint, Contents, Table, TensorForm
from .parts.compressed_tensors import COMPRESSED, as_compressed, compressed, compressed_config
from .parts.export_format import PLAIN, ExportFormat, ExportSettings, ImportSettings, Places, Served, hub_name
from .parts.gguf_file import BFLOAT16, FLOAT32

TRAINED = "draft_token_ids.json"  # The ids of a reduced vocabulary, ascending
_MASK, _DEPTHS = "pard_token", "draftsmith_depths"
"""Keys of the mask token, as engines read it, and of the number of tokens that are guessed in a pass, which they ask
for."""
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
    one, has the id `mask_token_id`. Of number formats float32 keeps that of the model."""
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
    return Contents(title="A draft language model", table=table,
                    example=example if weights in (FLOAT32, BFLOAT16) else "")


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
    drafter = DraftLM.create(config, target, None if ids is None else torch.tensor(ids))
    return drafter, drafter.state_dict()


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
