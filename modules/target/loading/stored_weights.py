"""Weights of a model as its files hold them: each of them there, in its shape, and finite.

transformers draws at random what a checkpoint lacks, and leaves out what its model has no place for, so that a folder
without one tensor still answers, with nonsense.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import UserError
from ..devices.split_weights import whole

log = logging.getLogger(__name__)

_REPORT = logging.getLogger("transformers.modeling_utils")
_NAMED = 3
"""Tensors that a sentence names."""


def read_model_whole(source: Any, name: str, **options: Any) -> Any:
    """The causal language model of a folder, hub id or GGUF file, all of whose weights are those of its files.

    Args:
        source: for transformers.
        name: of the model, for sentences.
        options: of `from_pretrained`.

    Raises:
        UserError: naming tensors that are missing, that are of another shape, or that belong to modules of the model
            whose configuration has no place for them.
    """
    from transformers import AutoModelForCausalLM

    with _without_report():
        model, info = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    # Tied weights, and those that an architecture may lack, are not among them.
    missing, unexpected = info["missing_keys"], info["unexpected_keys"]
    if missing:
        others = f", and holds {_listed(unexpected)}, which it does not have" if unexpected else ""
        raise UserError(f"the weights of {name} lack {_listed(missing)}, which its configuration asks for{others}; "
                        "they would be drawn at random: save or copy the model again, with the names of transformers")
    if info["mismatched_keys"]:
        key, found, expected = min(info["mismatched_keys"])
        raise UserError(f"the weights of {name} hold {key} of shape {list(found)}, its configuration asks for "
                        f"{list(expected)}; correct it, or save or copy the model again")
    # A bias of a layer that has none by the configuration is part of what the model computed. Other modules, such as
    # those for images or for further tokens, are not: many published checkpoints hold some. Quantised weights come with
    # tensors that transformers reads in ways of its own.
    modules = {path.rpartition(".")[0] for path, _ in model.named_parameters()}
    lost = [key for key in unexpected if key.rpartition(".")[0] in modules]
    if lost and getattr(model, "hf_quantizer", None) is None:
        raise UserError(f"the weights of {name} hold {_listed(lost)}, for which its configuration leaves no place; "
                        "without them it is another model: correct the configuration, or copy the model again")
    if unexpected:
        log.warning("the weights of %s hold %s, which its model does not have; they are left out", name,
                    _listed(unexpected))
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """A block in which transformers logs no table of the tensors that are named here."""
    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg) and "seem corrupted" not in str(record.msg)

    _REPORT.addFilter(other)
    try:
        yield
    finally:
        _REPORT.removeFilter(other)


def _listed(names: Iterable[str]) -> str:
    """The first names, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED:,} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more


@torch.no_grad()
def require_finite(model: Any, name: str) -> None:
    """Refuse weights that hold NaN or infinities, but for an input embedding of which a token has a finite row.

    Processes that share the model must call it together.

    Raises:
        UserError: naming the first such tensor.
    """
    embedding = model.get_input_embeddings().weight
    for path, parameter in model.named_parameters():
        weight = whole(parameter)
        if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or not weight.numel():
            continue
        # The extremes of a tensor take one pass and no memory, and are NaN where an element is.
        if bool(torch.stack(weight.aminmax()).isfinite().all()):
            continue
        # Tokens without a finite embedding end an answer and hurt no other one, unless the output layer has the row.
        rows = weight.isfinite().all(-1) if parameter is embedding else torch.zeros(1)
        if bool(rows.any()) and model.get_output_embeddings().weight is not embedding:
            log.warning("%d tokens of %s have an embedding that holds nan or inf; answers end at them",
                        int((~rows).sum()), name)
            continue
        raise UserError(f"the tensor {path} of {name} holds values that are not finite (nan or inf) in "
                        f"{str(weight.dtype).removeprefix('torch.')}; save or copy the model again")
