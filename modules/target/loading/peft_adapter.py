"""Adapters of a target in a folder that PEFT wrote, checked by shapes alone and merged into the model, by peft itself.

peft would add the changes in the model's number format. Here each changed layer is float32 or wider while they are
added and is rounded once, so that base and adapter are the same target in every format, as a merged folder would be."""

import logging
import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ...errors import UserError
from ...files.atomic_files import files_digest
from ...files.json_records import read_object
from .model_parts import text_of
from .self_check import LIBRARY_ERRORS
from .stored_weights import all_finite

log = logging.getLogger(__name__)
CONFIG, WEIGHTS, TEMPLATE = "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"
MOST_RANK = 512  # Largest rank that vLLM loads
_PREFIX = "base_model.model."  # Start of the names of an adapter's tensors
_MERGED = ("alpha_pattern", "fan_in_fan_out", "lora_bias", "rank_pattern", "target_parameters", "use_bdlora",
           "use_dora", "use_qalora", "use_rslora")
"""Settings, unset in most adapters, that vLLM, SGLang or llama.cpp refuses or passes over."""


@dataclass(frozen=True, kw_only=True)
class MergedAdapter:
    """An adapter whose changes are in a model's weights."""

    named: str  # The setting that names it
    digest: str  # Hash of its files
    rank: int  # Rank with which engines load it next to its base; 0 where not all of them know what it is made of


def merge_adapter(named: str | None, model: Any, base: str) -> None:
    """Merge the adapter in a folder, if one is named, into a model in place, which gets a `merged_adapter`; `base` is
    the model's name. Of a sketch on torch's meta device the shapes alone change. Raises UserError if the folder holds
    no adapter of this model in safetensors files, a kind that cannot be merged, or values that are not finite."""
    if named is None:
        return
    folder, where, text = Path(named), f"target.adapter {named}", text_of(model)
    ends = text.get_input_embeddings(), text.get_output_embeddings()
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise UserError(f"{where} holds no {file}; give a folder that save_pretrained of peft wrote (no pickle is "
                            "read: it can run code)")
    if find_spec("peft") is None:
        raise UserError(f"{where} is read by peft, which is not installed; install it (pip install peft)")
    said = read_object(folder / CONFIG, "save or copy the adapter again")
    if said.get("megatron_config"):
        raise UserError(f"{where} has a megatron_config, which imports modules that it names; save it without one")
    theirs, starts = said.get("base_model_name_or_path"), tuple(
        f"{_PREFIX}{name}." for name, module in text.named_modules() if module in ends)
    try:
        tensors = load_file(folder / WEIGHTS)
        for key, tensor in tensors.items():
            if not all_finite(tensor):
                raise UserError(f"{where} holds {key} with values that are not finite (nan or inf); train or copy it "
                                "again")
            if key.removesuffix("weight").removesuffix("base_layer.") in starts and len(tensor) != len(ends[1].weight):
                raise UserError(f"{where} was trained with {len(tensor):,} tokens ({key}), and {base} has "
                                f"{len(ends[1].weight):,}; resize the model, merge both by merge_and_unload of peft, "
                                "save that with its tokenizer and give its folder as target.name")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _merge(folder, where, text, ends, said.get("peft_type"))
    except UserError:
        raise
    except (*LIBRARY_ERRORS, re.error) as error:
        reason = " ".join(str(error).split())[:240] or type(error).__name__
        remedy = (f"give its own base{f' ({theirs})' if theirs else ''} as target.name, or merge both by "
                  "merge_and_unload of peft and give their folder")
        raise UserError(f"{where} cannot be merged into {base} ({reason}); "
                        f"{'copy it again' if isinstance(error, SafetensorError) else remedy}") from error
    if text.get_output_embeddings().weight is not text.get_input_embeddings().weight:
        # Saved as it is now: with the tie declared, the adapted output layer would be left out.
        text.config.tie_word_embeddings = model.config.tie_word_embeddings = False
    if not ends[0].weight.is_meta and theirs and Path(str(theirs)).name.lower() != Path(base).name.lower():
        log.warning("%s names %r as its base, and is merged into %s, which it fits by its shapes", where, theirs, base)
    start = said.get("init_lora_weights", True)
    plain = said.get("peft_type") == "LORA" and (isinstance(start, bool) or start == "gaussian") and not any(
        said.get(name) for name in _MERGED) and all(
        (".lora_A." in key or ".lora_B." in key) and not key.startswith(starts) for key in tensors)
    rank = said.get("r", 8) if plain else 0
    model.merged_adapter = MergedAdapter(named=where, digest=files_digest(folder, (CONFIG, WEIGHTS))[:32],
                                         rank=rank if rank <= MOST_RANK else 0)


def _merge(folder: Path, where: str, model: Any, ends: tuple[Any, Any], kind: Any) -> None:
    """Merge by peft; `ends` are the embedding and the output layer as they are now, `kind` is the adapter's."""
    from peft import LoraConfig, PeftConfig, PeftModel, PeftType
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    if str(kind) not in PeftType.__members__:
        raise UserError(f"{where} is of the kind {kind}, which peft does not know; update it (pip install -U peft), or "
                        "train a LoRA")
    config, sketched = PeftConfig.from_pretrained(str(folder)), ends[0].weight.is_meta
    if sketched and isinstance(config, LoraConfig):
        # Where training began, which some of its kinds take from the weights' values.
        config.init_lora_weights = True
    wrapped: Any = PeftModel(model, config)
    if not isinstance(wrapped.base_model, BaseTuner):
        raise UserError(f"{where} is of the kind {PeftType(config.peft_type).value}, which adds to a model and does "
                        "not change its weights; train a LoRA")
    found = wrapped.load_adapter(str(folder), "default", torch_device="cpu")
    if wrong := sorted([*found.missing_keys, *found.unexpected_keys]):
        raise ValueError(f"{len(wrong)} tensors, such as {wrong[0].removeprefix(_PREFIX)}, are in one of them alone")
    embedding, head = ends
    if head.weight is embedding.weight and (model.get_input_embeddings(), model.get_output_embeddings()) != ends:
        # What changes one of the two leaves the other.
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for layer in [one for one in model.modules() if isinstance(one, BaseTunerLayer) and not sketched]:
        base = layer.get_base_layer()
        dtype = next(base.parameters()).dtype
        base.to(torch.promote_types(dtype, torch.float32))
        layer.merge(safe_merge=True)
        layer.get_base_layer().to(dtype)
    # What is merged already it leaves as it is.
    wrapped.merge_and_unload()
