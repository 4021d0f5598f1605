"""The check of a target at load: what may be verified at all, and whether token trees are read as the model reads text.

Shapes: L tokens of the check's text, V vocabulary."""

import inspect
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from ...errors import UserError
from ...token_tree import TokenTree
from ..attention.tree_attention import CHUNKED, AttentionCall, reach_words
from ..recurrent.recurrent_passes import install
from ..target_rows import TargetRows
from .model_parts import decoder_of, layer_list

_KINDS = {"full_attention", "sliding_attention", "attention", "linear_attention", "mamba", "conv", "hybrid",
          "hybrid_sliding", "mlp", "moe", CHUNKED}  # Kinds of layers that a tree pass can be formed for
TEXT_LENGTH = 8  # Tokens of the check's text
LIBRARY_ERRORS = (OSError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError,
                  ImportError, RuntimeError, MemoryError, SafetensorError, StrictDataclassError, struct.error)
"""The errors of transformers, tokenizers and a model's own code where a file of the model is not as they expect."""
PASSES = 3  # Passes of the check: a prompt, a tree with a sibling in it, and a tree after a path of that was committed
_PASS_ARGUMENTS = ("inputs_embeds", "attention_mask", "position_ids", "past_key_values")
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3}  # Largest difference of two logits, as a share of the largest one
_HALF_PRECISION_BOUND = 0.1  # The same where only an excerpt in float32 can tell an error from rounding


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what a model's own code raises in a pass into one sentence: its config asks for what it cannot do."""
    try:
        yield
    except UserError:
        raise
    except LIBRARY_ERRORS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{name} cannot run a pass with this configuration ({reason}). Choose another target, or "
                        "correct its config.json") from error


def refuse_unverifiable(model: Any) -> None:
    """Refuse what a tree pass cannot be formed for, before any pass: a recurrent state of an unknown kind, a kind of
    attention without a mask here, ALiBi (it counts cache slots, not positions), or a decoder without position ids or a
    cache. Raises UserError."""
    name, config = type(model).__name__, model.config.get_text_config()
    if config.is_encoder_decoder or (type(config) in MODEL_FOR_MASKED_LM_MAPPING
                                     and not getattr(config, "is_decoder", False)):
        raise UserError(f"{name} is an encoder, whose tokens see those after them, and cannot continue text. Choose a "
                        "decoder-only target")
    unknown = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if unknown:
        raise UserError(f"{name} has layers of the kind {', '.join(sorted(unknown))}, which this version cannot "
                        "verify exactly. Choose a target with full, sliding or linear attention")
    if getattr(model, "_is_stateful", False) and not install(decoder_of(model)):
        raise UserError(f"{name} keeps a recurrent state of a kind that this version cannot verify in trees. Choose a "
                        "target with attention, gated delta rules, Mamba layers or short convolutions")
    layer_list(decoder_of(model), config.num_hidden_layers)
    accepted = inspect.signature(decoder_of(model).forward).parameters
    if missing := [argument for argument in _PASS_ARGUMENTS if argument not in accepted]:
        raise UserError(
            f"{name} takes no {' and no '.join(missing)}, so its tokens cannot be placed in a tree. Choose a target "
            "with position ids and a key-value cache")
    if getattr(config, "alibi", False):
        raise UserError(
            f"{name} has ALiBi attention, whose distances count cache slots, and the nodes of a tree share positions. "
            "Choose a target with rotary or learned positions")


def check_attention(name: str, config: Any, reaches: dict[int, tuple[int | None, int | None]],
                    calls: Sequence[AttentionCall], passes: int, context_length: int) -> int:
    """Compare what each layer handed to the attention function with what the config declares (UserError); `reaches` are
    the windows and chunks of the layers with attention. Returns how often a layer calls it in a pass. A layer may call
    it several times a pass, all layers equally often. Models that never call it form their attention themselves: the
    logits show whether they read the mask, but a window would show in longer texts only."""
    fields = config.to_dict()
    if not calls and not any(("window" in key or "chunk" in key) and value for key, value in fields.items()):
        return 0
    layers = list(reaches)
    each, odd = divmod(len(calls), passes * len(layers))
    if odd or not each:
        raise UserError(
            f"{name} calls the attention function {len(calls)} times in {passes} passes of {len(reaches)} layers, so "
            "its sliding windows cannot be checked. Choose another target")
    for place, call in enumerate(calls):
        layer = layers[place // each % len(layers)]
        window, chunk = (None if size is None or size >= context_length else size for size in call.reach)
        declared, found = reach_words(reaches[layer]), reach_words((window, chunk))
        if (window, chunk) != reaches[layer]:
            raise UserError(
                f"layer {layer} of {name} has {declared} by its config, but its attention is given {found}: longer "
                "texts would be decoded wrongly. Choose another target, or a configuration without sliding windows")
        if (window, chunk) != (None, None) and not call.placed:
            raise UserError(f"layer {layer} of {name} has {found}, but its attention is not given the positions to "
                            "apply it by. Choose another target")
    return each


def own_logits(model: Any, text_1L: Tensor, *, steps: bool) -> Tensor:
    """The logits [1, L, V] along the check's text of the model as transformers made it. With `steps` its second half is
    read token by token, as `generate` reads an answer: recurrent layers have other code for that, which some models
    give other bounds."""
    if not steps:
        whole_1LV: Tensor = model(input_ids=text_1L, use_cache=False).logits
        return whole_1LV
    order_1L, cache, logits, half = torch.arange(TEXT_LENGTH, device=text_1L.device)[None], None, [], TEXT_LENGTH // 2
    for place in (slice(0, half), *(slice(token, token + 1) for token in range(half, TEXT_LENGTH))):
        output = model(input_ids=text_1L[:, place], position_ids=order_1L[:, place], past_key_values=cache,
                       use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def read_as_tree(rows: TargetRows, text_1L: Tensor) -> Tensor:
    """Logits [1, L, V] along the check's text, from a prompt's pass and those of two trees after it, in one empty row
    with room for `TEXT_LENGTH` + 1 tokens."""
    device, half = text_1L.device, TEXT_LENGTH // 2
    count_1, two_1 = torch.tensor([half], device=device), torch.tensor([2], device=device)
    logits = [rows.run(TokenTree.prompts(text_1L[:, :half], count_1)).logits_BMV]
    rows.commit(torch.arange(half, device=device)[None], count_1, [half], moved=False)
    # The sibling repeats the text's first token: a pass that sees it differs, and so does one after it was committed.
    path_12 = torch.tensor([[0, 2]], device=device)
    for first in (half, half + 2):
        tokens_13 = torch.cat([text_1L[:, first, None], text_1L[:, :1], text_1L[:, first + 1, None]], dim=1)
        tree = TokenTree.from_parents(tokens_13, torch.tensor([[-1, 0, 0]], device=device))
        logits.append(rows.run(tree).logits_BMV[:, path_12[0]])
        rows.commit(path_12, two_1, [2])
    return torch.cat(logits, dim=1)


def check_logits(name: str, dtype: torch.dtype, found_1LV: Tensor, expected_1LV: Tensor, *,
                 recurrent: bool = False) -> None:
    """Compare the logits of tree passes along the check's text with the model's own: UserError if they differ by more
    than rounding, or are not finite. Some models return wider logits than their `dtype`, which are no more exact, and
    the code of `recurrent` layers computes in float32 at most."""
    if not bool(expected_1LV.isfinite().all()):
        raise UserError(f"{name} gives logits that are not finite (nan or inf) in "
                        f"{str(dtype).removeprefix('torch.')}; choose another target, or another target.dtype")
    share = BOUNDS.get(torch.float32 if recurrent and dtype is torch.float64 else dtype, _HALF_PRECISION_BOUND)
    bound = share * float(expected_1LV.abs().max())
    gap = float((found_1LV - expected_1LV).abs().max())
    # Not "gap > bound", which is False for NaN.
    if not gap <= bound:
        raise UserError(
            f"{name} does not decode token trees exactly here: its logits differ by "
            f"{gap:.2g} from its own forward pass (bound {bound:.2g}). Choose another target; this architecture "
            "needs attention that this version does not know")
