"""A target's own head, written out: every guess by one pass over the whole text, without a cache.

Shapes: L positions, D hidden size, V vocabulary.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from support.target_folders import LINES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def head_logits(line: str, folder: Path, tokens: list[int], first_LD: Tensor, embedding_VD: Tensor, output_VD: Tensor,
                guesses: list[int]) -> Tensor:
    """Logits [1 + guesses, V] of the token after the text, and after each of the guesses that follow it.

    Args:
        line: one of `LINES`.
        folder: of the target.
        tokens: the text, whose last token has no state yet.
        first_LD: the target's final states of all others.
        embedding_VD: of the target.
        output_VD: the weight of its output layer.
        guesses: tokens that are guessed after the text.
    """
    known, held = LINES[line], load_file(folder / "model.safetensors")
    weights = {name: held[f"{known.names[name]}.weight"].to(first_LD) for name in ("enorm", "hnorm", "eh_proj", "norm")}
    given = AutoConfig.from_pretrained(folder).get_text_config()
    config = type(given)(**(given.to_dict() | known.head))
    shift, eps = float(known.less_one), config.rms_norm_eps
    start = known.names["layer"]
    apart = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens", "token_layernorm", "hidden_layernorm",
             "input_proj", "final_layernorm")
    tensors = {"model.layers.0." + name.removeprefix(start): tensor for name, tensor in held.items()
               if name.startswith(start) and not name.removeprefix(start).startswith(apart)}
    model_class = type(AutoModelForCausalLM.from_config(config))
    blank, last_norm = embedding_VD.detach(), held[f"{known.names['norm']}.weight"]
    model = model_class.from_pretrained(None, config=config, state_dict={
        **tensors, "model.norm.weight": last_norm, "model.embed_tokens.weight": blank.clone(),
        "lm_head.weight": blank.clone()}).to(first_LD.dtype).eval()
    model.set_experts_implementation("eager")
    layer = model.get_decoder()

    def norm(states: Tensor, name: str) -> Tensor:
        return states * (states.square().mean(-1, keepdim=True) + eps).rsqrt() * (weights[name] + shift)

    states_LD, read, logits = first_LD, tokens[1:], []
    for guess in [*guesses, None]:
        parts = [norm(embedding_VD[read], "enorm"), norm(states_LD, "hnorm")]
        joined_LD = torch.cat(parts[::-1] if known.state_first else parts, -1) @ weights["eh_proj"].T
        own_D = layer(inputs_embeds=joined_LD[None], use_cache=False).last_hidden_state[0, -1]
        logits.append(output_VD @ own_D)
        if guess is not None:
            states_LD, read = torch.cat([states_LD, own_D[None]]), [*read, guess]
    return torch.stack(logits)
