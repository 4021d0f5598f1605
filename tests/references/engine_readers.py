"""Exported folders read as the engines do, in the plainest form: matrices by their names in the file, and no more of
the target than its embedding and output layer as they stand in its own files, and its states.

Shapes: L positions with a token after each, D hidden size, E width of the drafter, V vocabulary, Q draft vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Read:
    """A folder, and what an engine has of the target."""

    def __init__(self, folder: Path, embedding_VD: Tensor, output_VD: Tensor) -> None:
        [file] = folder.glob("*.safetensors")
        self.tensors, self.config = load_file(file), json.loads((folder / "config.json").read_text())
        self.embedding_VD, self.output_VD = embedding_VD, output_VD

    def linear(self, name: str, state: Tensor) -> Tensor:
        """A linear layer of the file, with its bias where it has one."""
        bias = self.tensors.get(f"{name}.bias")
        return state @ self.tensors[f"{name}.weight"].mT + (0 if bias is None else bias)

    def normed(self, name: str, state: Tensor, config: dict[str, Any]) -> Tensor:
        """RMSNorm of the file."""
        return self.tensors[f"{name}.weight"] * state / (state.square().mean(-1, True) + config["rms_norm_eps"]).sqrt()

    def attention(self, prefix: str, read: Tensor, config: dict[str, Any]) -> Tensor:
        """The attention of a Llama, or of a Qwen3 where the file has its norms, over the earlier positions, [L, E]."""
        length, size = len(read), config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = torch.arange(length)[:, None] / base ** (torch.arange(0, size, 2) / size)
        cosine, sine = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))

        def heads(name: str) -> Tensor:
            split, norm = self.linear(f"{prefix}{name}", read).view(length, -1, size), f"{prefix}{name[0]}_norm"
            return self.normed(norm, split, config) if f"{norm}.weight" in self.tensors else split

        def turned(state: Tensor) -> Tensor:
            first, second = state.chunk(2, -1)
            return state * cosine + torch.cat([-second, first], -1) * sine

        query, key, value = turned(heads("q_proj")), turned(heads("k_proj")), heads("v_proj")
        group = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhe,khe->hqk", query, key.repeat_interleave(group, 1)) / size**0.5
        scores = scores.masked_fill(unseen(length, length, config), -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khe->qhe", scores, value.repeat_interleave(group, 1))
        return self.linear(f"{prefix}o_proj", mixed.flatten(1))

    def slots(self, prefix: str, text_ND: Tensor, slots_SD: Tensor, config: dict[str, Any]) -> Tensor:
        """Qwen3's attention of a block's slots over the text before it and the block, [S, D]."""
        size, both = config["head_dim"], torch.cat([text_ND, slots_SD])
        angles = torch.arange(len(both))[:, None] / config["rope_theta"] ** (torch.arange(0, size, 2) / size)

        def heads(name: str, read: Tensor, norm: str = "") -> Tensor:
            split = self.linear(f"{prefix}{name}", read).view(len(read), -1, size)
            if not norm:
                return split
            first, second = self.normed(f"{prefix}{norm}", split, config).chunk(2, -1)
            cosine, sine = (part[-len(read):, None] for part in (angles.cos(), angles.sin()))
            return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

        query, key, value = heads("q_proj", slots_SD, "q_norm"), heads("k_proj", both, "k_norm"), heads("v_proj", both)
        group = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhe,khe->hqk", query, key.repeat_interleave(group, 1)) / size**0.5
        hidden_SN = unseen(len(slots_SD), len(both), config)
        if not config["is_causal"]:
            hidden_SN[:, len(text_ND) :] = False
        scores = scores.masked_fill(hidden_SN, -torch.inf)
        mixed = torch.einsum("hqk,khe->qhe", scores.softmax(-1), value.repeat_interleave(group, 1))
        return self.linear(f"{prefix}o_proj", mixed.flatten(1))

    def markov(self, slot_D: Tensor, root: Tensor, config: dict[str, Any]) -> Tensor | int:
        """DSpark's bias of the first guess, after the root."""
        form, head = config.get("markov_head_type"), "markov_head."
        if form is None:
            return 0
        before_R = self.tensors[f"{head}markov_w1.weight"][root]
        if form == "gated":
            before_R = before_R * self.linear(f"{head}gate_proj", torch.cat([slot_D, before_R])).sigmoid()
        if form == "rnn":
            joined = torch.cat([torch.zeros_like(before_R), before_R, slot_D])
            before_R = self.linear(f"{head}joint_proj", joined).chunk(3)[2].tanh()
        return before_R @ self.tensors[f"{head}markov_w2.weight"].mT

    def gated(self, prefix: str, state: Tensor) -> Tensor:
        """A Llama's MLP."""
        inner = torch.nn.functional.silu(self.linear(f"{prefix}gate_proj", state))
        return self.linear(f"{prefix}down_proj", inner * self.linear(f"{prefix}up_proj", state))


def unseen(queries: int, keys: int, config: dict[str, Any]) -> Tensor:
    """True where one of the last tokens does not see a token: a later one, or one before its window."""
    hidden = torch.ones(queries, keys).triu(1 + keys - queries) > 0
    window = config["sliding_window"] if "sliding_attention" in config.get("layer_types", ()) else keys
    return hidden | (torch.ones(queries, keys).tril(keys - queries - window) > 0)


def first_eagle(read: Read, after_L: Tensor, final_LD: Tensor, _taps: Tensor) -> Tensor:
    """EAGLE-1: fc of [embedding of the next token, state], a layer without a norm before it, the target's output."""
    embedding_VD = read.tensors.get("embed_tokens.weight", read.embedding_VD)
    state = read.linear("fc", torch.cat([embedding_VD[after_L], final_LD], -1))
    state = state + read.attention("layers.0.self_attn.", state, read.config)
    state = state + read.gated("layers.0.mlp.", read.normed("layers.0.post_attention_layernorm", state, read.config))
    return state @ read.output_VD.mT


def third_eagle(read: Read, after_L: Tensor, _final: Tensor, taps_LT: Tensor) -> Tensor:
    """EAGLE-3: norms of embedding and fused state side by side; its own output layer where there is one. Logits of
    tokens outside its vocabulary are NaN."""
    config = read.config.get("transformer_layer_config", read.config)
    first = "midlayer." if "midlayer.mlp.up_proj.weight" in read.tensors else "layers.0."
    embedded = read.tensors.get("embed_tokens.weight", read.embedding_VD)[after_L]
    fused = read.linear("fc", taps_LT)
    joined = torch.cat([read.normed(f"{first}input_layernorm", embedded, config),
                        read.normed(f"{first}hidden_norm", fused, config)], -1)
    state = fused + read.attention(f"{first}self_attn.", joined, config)
    state = state + read.gated(f"{first}mlp.", read.normed(f"{first}post_attention_layernorm", state, config))
    logits_LQ = read.normed("norm", state, config) @ read.tensors.get("lm_head.weight", read.output_VD).mT
    offsets_Q = read.tensors.get("d2t", torch.zeros(logits_LQ.shape[1], dtype=torch.long))
    logits_LV = torch.full((len(after_L), len(read.output_VD)), torch.nan)
    logits_LV[:, torch.arange(len(offsets_Q)) + offsets_Q] = logits_LQ
    return logits_LV


def medusa(read: Read, _after: Tensor, final_LD: Tensor, _taps: Tensor) -> Tensor:
    """The first head: blocks x + SiLU(W x + b), then its own output layer."""
    layers = read.config["medusa_num_layers"]
    for layer in range(layers):
        final_LD = final_LD + torch.nn.functional.silu(read.linear(f"0.{layer}.linear", final_LD))
    return read.linear(f"0.{layers}", final_LD)


def medusa_of_vllm(read: Read, _after: Tensor, final_LD: Tensor, _taps: Tensor) -> Tensor:
    """Logits of vLLM's Medusa head, whose names are others, over the tokens of `token_map`."""
    for layer in range(read.config["num_hidden_layers"]):
        final_LD = final_LD + torch.nn.functional.silu(read.linear(f"blocks.0.layers.{layer}", final_LD))
    logits_LQ = read.linear("lm_head", final_LD)
    logits_LV = torch.full((len(final_LD), len(read.output_VD)), torch.nan)
    logits_LV[:, read.tensors.get("token_map", torch.arange(logits_LQ.shape[1]))] = logits_LQ
    return logits_LV


def hydra(read: Read, after_L: Tensor, final_LD: Tensor, _taps: Tensor) -> Tensor:
    """The first head: a block of [state, embedding of the next token], then its own output layer with a bias."""
    prefix = "prefix_embeding_layer."
    slot, output = ("1", "0.1") if f"{prefix}norm.weight" in read.tensors else ("0", "0")
    joined = torch.cat([final_LD, read.tensors["input_embed_fn.weight"][after_L]], -1)
    added = torch.nn.functional.silu(read.linear(f"hydra_mlp.0.{slot}.linear", joined))
    return read.linear(f"hydra_lm_head.{output}", read.linear(f"hydra_mlp.0.{slot}.res_connection", joined) + added)


def block_draft(read: Read, after_L: Tensor, _final: Tensor, taps_LT: Tensor) -> Tensor:
    """DFlash and DSpark: the first guess of a block after each position, the token after it as the root. Logits of
    tokens outside its vocabulary are NaN."""
    inner = read.config.get("transformer_layer_config", read.config)
    said = {**inner, **read.config, **read.config.get("dflash_config", {})}
    embedding_VD, output_QD = read.embedding_VD, read.tensors.get("lm_head.weight", read.output_VD)
    context_LD, guesses = read.normed("hidden_norm", read.linear("fc", taps_LT), said), []
    for place in range(len(after_L)):
        mask = torch.full((said["block_size"] - 1,), said["mask_token_id"])
        state_SD = embedding_VD[torch.cat([after_L[place : place + 1], mask])]
        for layer in range(said["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            normed_SD = read.normed(f"{prefix}input_layernorm", state_SD, said)
            state_SD = state_SD + read.slots(f"{prefix}self_attn.", context_LD[: place + 1], normed_SD, said)
            normed_SD = read.normed(f"{prefix}post_attention_layernorm", state_SD, said)
            state_SD = state_SD + read.gated(f"{prefix}mlp.", normed_SD)
        slot_D = read.normed("norm", state_SD, said)[0 if said["sample_from_anchor"] else 1]
        guesses.append(slot_D @ output_QD.mT + read.markov(slot_D, after_L[place], said))
    logits_LQ = torch.stack(guesses)
    offsets_Q = read.tensors.get("d2t", torch.zeros(logits_LQ.shape[1], dtype=torch.long))
    logits_LV = torch.full((len(after_L), len(read.output_VD)), torch.nan)
    logits_LV[:, torch.arange(len(offsets_Q)) + offsets_Q] = logits_LQ
    return logits_LV


READERS = {"dflash": block_draft,
           "eagle": first_eagle, "eagle-sglang": first_eagle, "eagle3": third_eagle, "speculators": third_eagle,
           "medusa": medusa, "medusa-vllm": medusa_of_vllm, "hydra": hydra}
"""Readers by layout; EAGLE-3 in the official layout by its family."""
