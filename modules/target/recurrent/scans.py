"""The recurrences of transformers' recurrent layers, over the nodes of a tree.

The chunked form of a recurrence stays true when its causal mask is replaced by that of ancestors: parents come before
their children, so the system that the delta rule solves stays lower triangular (arXiv:2412.06464 equation 10 for the
gated delta rule, arXiv:2510.26692 for one decay a channel, arXiv:2405.21060 equation 16 for Mamba-2). Nothing is
computed twice at commit: each node leaves what it adds to the state. Mamba-1 has a decay for each channel and state and
no such form; its nodes are computed one after the other, each from its parent's state.

Shapes: B rows, N nodes, P nodes of a path, H heads, K width of a key, V width of a value, C decays of a head (1 or K),
D channels, S states of a channel, W taps of a convolution, X columns: those before the pass and those of its nodes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ...token_tree import TokenTree


@dataclass(frozen=True)
class Committed:
    """The state after a prompt, all of which is committed."""

    state: Tensor

    def after(self, path_BP: Tensor, counts_B: Tensor) -> Tensor:
        """This state."""
        return self.state


@dataclass(frozen=True)
class Additions:
    """The additions of nodes to a state of keys and values: outer products, decayed by the nodes after them."""

    former_BHKV: Tensor  # The state before the pass
    decay_BHNC: Tensor  # Sum of the log decays from the root to each node, float64
    keys_BHNK: Tensor
    values_BHNV: Tensor
    ancestors_BNN: Tensor
    transposed: bool  # Whether the layer keeps its state as values by keys

    def after(self, path_BP: Tensor, counts_B: Tensor) -> Tensor:
        """The decayed former state and the additions of the path, which is its last node's ancestors and itself."""
        rows_B = torch.arange(len(path_BP), device=path_BP.device)
        end_B = path_BP[rows_B, (counts_B - 1).clamp(min=0)]
        total_BHC, seen_BN = self.decay_BHNC[rows_B, :, end_B], self.ancestors_BNN[rows_B, end_B]
        left_BHNC = (total_BHC[:, :, None] - self.decay_BHNC).masked_fill(~seen_BN[:, None, :, None], -torch.inf).exp()
        state = total_BHC.exp().to(self.former_BHKV.dtype)[..., None] * self.former_BHKV
        left_BHNK = left_BHNC.to(self.keys_BHNK.dtype) * self.keys_BHNK
        state = state + left_BHNK.transpose(-1, -2) @ self.values_BHNV
        return state.transpose(-1, -2) if self.transposed else state


@dataclass(frozen=True)
class Steps:
    """The steps of a state of Mamba-1 at the nodes of a pass."""

    former_BDS: Tensor
    decays_DS: Tensor  # Decay of each channel and state in a unit of time
    times_BND: Tensor  # Time that passes at each node in each channel
    inputs_BND: Tensor
    keys_BNS: Tensor

    def at(self, state_BDS: Tensor, nodes_B: Tensor) -> Tensor:
        """The state after one node of each row, from that before it."""
        rows_B = torch.arange(len(nodes_B), device=nodes_B.device)
        times_BD1, inputs_BD1 = (each[rows_B, nodes_B][..., None] for each in (self.times_BND, self.inputs_BND))
        return (self.decays_DS * times_BD1).exp() * state_BDS + inputs_BD1 * self.keys_BNS[rows_B, nodes_B][:, None]

    def after(self, path_BP: Tensor, counts_B: Tensor) -> Tensor:
        """The state after the steps of the path, taken again: states of all nodes would fill the memory."""
        state_BDS = self.former_BDS
        for place in range(path_BP.shape[1]):
            within_B11 = (place < counts_B)[:, None, None]
            state_BDS = torch.where(within_B11, self.at(state_BDS, path_BP[:, place]), state_BDS)
        return state_BDS


@dataclass(frozen=True)
class Columns:
    """The inputs of a convolution in a pass: those before it and those of its nodes."""

    columns_BDX: Tensor
    windows_BNW: Tensor | None  # The column of each tap of each node; None along a prompt

    def after(self, path_BP: Tensor, counts_B: Tensor) -> Tensor:
        """The last W - 1 columns up to the end of the path, [B, D, W - 1]."""
        if self.windows_BNW is None:
            width = self.columns_BDX.shape[2] - path_BP.shape[1]
            last_BW = counts_B[:, None] + torch.arange(width, device=counts_B.device)
        else:
            rows_B = torch.arange(len(path_BP), device=path_BP.device)
            last_BW = self.windows_BNW[rows_B, path_BP[rows_B, (counts_B - 1).clamp(min=0)]][:, 1:]
        return self.columns_BDX.gather(2, last_BW[:, None].expand(-1, self.columns_BDX.shape[1], -1))


Branches = Committed | Additions | Steps | Columns
"""A layer's record of the nodes of a pass: `after` gives the state after the first counts_B[b] nodes of a row's
path."""


def linear_attention(query_BHNK: Tensor, key_BHNK: Tensor, value_BHNV: Tensor, log_decay_BHNC: Tensor,
                     strength_BHN1: Tensor | None, former_BHKV: Tensor | None, tree: TokenTree, *,
                     transposed: bool = False) -> tuple[Tensor, Additions]:
    """Outputs [B, H, N, V] of linear attention with decays at the nodes of a tree, and what they add to the state. With
    the decays' sum G_i from the root to node i and D_ij = exp(G_i - G_j) for its ancestors j and itself, else 0: out_i
    = exp(G_i) q_i S + sum_j D_ij (q_i k_j) u_j, where u = v, or by the delta rule of strength b the solution of u_i +
    b_i sum_{j<i} D_ij (k_i k_j) u_j = b_i (v_i - exp(G_i) k_i S)."""
    if former_BHKV is None:
        former_BHKV = key_BHNK.new_zeros(*key_BHNK.shape[:2], key_BHNK.shape[3], value_BHNV.shape[3])
    seen_B1NN, dtype = tree.ancestors_BNN[:, None], key_BHNK.dtype
    # Sums over long paths with strong decays in them differ by less than float32 keeps of them.
    decay_BHNC = seen_B1NN.double() @ log_decay_BHNC.double()
    kept_BHNC = decay_BHNC.exp().to(dtype)
    if decay_BHNC.shape[-1] == 1:
        # Masked before the exponential: what is not above a node may have any decay, and infinity times 0 is no number.
        between = (decay_BHNC - decay_BHNC.transpose(-1, -2)).masked_fill(~seen_B1NN, -torch.inf).exp().to(dtype)
        scores_BHNN, overlaps_BHNN = ((states @ key_BHNK.transpose(-1, -2)) * between
                                      for states in (query_BHNK, key_BHNK))
    else:
        between = decay_BHNC[:, :, :, None] - decay_BHNC[:, :, None]
        between = between.masked_fill(~seen_B1NN[..., None], -torch.inf).exp().to(dtype)
        scores_BHNN, overlaps_BHNN = (torch.einsum("bhik,bhjk,bhijk->bhij", states, key_BHNK, between)
                                      for states in (query_BHNK, key_BHNK))
    added_BHNV = value_BHNV
    if strength_BHN1 is not None:
        wanted_BHNV = strength_BHN1 * (value_BHNV - (kept_BHNC * key_BHNK) @ former_BHKV)
        added_BHNV = torch.linalg.solve_triangular(strength_BHN1 * overlaps_BHNN, wanted_BHNV, upper=False,
                                                   unitriangular=True)
    out_BHNV = (kept_BHNC * query_BHNK) @ former_BHKV + scores_BHNN @ added_BHNV
    return out_BHNV, Additions(former_BHKV, decay_BHNC, key_BHNK, added_BHNV, tree.ancestors_BNN, transposed)


def _widened(*tensors: Tensor) -> list[Tensor]:
    """Tensors [B, N, H, ...] as [B, H, N, ...] in float32 or wider, as the layers' own code computes."""
    return [tensor.transpose(1, 2).to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def delta_rule(given: dict[str, Any], state: Tensor | None, tree: TokenTree) -> tuple[Tensor, Branches]:
    """The gated delta rule with a decay a head (Qwen3-Next, OLMo hybrid) or a channel (Kimi Linear)."""
    query, key, value, decay, strength = _widened(*(given[name] for name in ("query", "key", "value", "g", "beta")))
    if (groups := value.shape[1] // key.shape[1]) > 1:
        query, key = (states.repeat_interleave(groups, dim=1) for states in (query, key))
    if given.get("use_qk_l2norm_in_kernel"):
        query, key = (states * torch.rsqrt(states.square().sum(-1, keepdim=True) + 1e-6) for states in (query, key))
    out_BHNV, additions = linear_attention(
        query * query.shape[-1] ** -0.5, key, value, decay if decay.dim() == 4 else decay[..., None],
        strength[..., None], state, tree)
    return out_BHNV.transpose(1, 2).to(given["query"].dtype).contiguous(), additions


def mamba2(given: dict[str, Any], state: Tensor | None, tree: TokenTree) -> tuple[Tensor, Branches]:
    """The state space model of Mamba-2 (Nemotron-H, Bamba, Granite hybrid, Falcon-H1, Zamba2)."""
    times = given["dt"]
    if (bias := given.get("dt_bias")) is not None:
        times = times + bias.to(times.dtype)
    if given.get("dt_softplus"):
        times = softplus(times)
    # Without `dt_limit`: transformers bounds the times of a prompt alone (Nemotron-H, Zamba2), not those of its steps,
    # in which `generate` reads an answer.
    inputs, times, keys, queries = _widened(given["hidden_states"], times, given["B"], given["C"])
    keys, queries = (states.repeat_interleave(inputs.shape[1] // states.shape[1], dim=1) for states in (keys, queries))
    out_BHNV, additions = linear_attention(
        queries, keys, inputs * times[..., None], (given["A"].to(times.dtype)[:, None] * times)[..., None], None,
        None if state is None else state.transpose(-1, -2), tree, transposed=True)
    if given.get("D") is not None:
        out_BHNV = out_BHNV + given["D"][:, None, None] * inputs
    return out_BHNV.transpose(1, 2).contiguous(), additions


def mamba1(given: dict[str, Any], state: Tensor | None, tree: TokenTree) -> tuple[Tensor, Branches]:
    """The selective scan of Mamba (Jamba, Zamba), node after node, and along the tokens of a prompt."""
    wide = torch.promote_types(given["hidden_states"].dtype, torch.float32)
    times = given["dt"]
    if (bias := given.get("delta_bias")) is not None:
        times = times + bias.to(times.dtype)[..., None]
    if given.get("delta_softplus"):
        times = softplus(times)
    inputs_BND, times_BND, keys_BNS, queries_BNS = (
        tensor.transpose(1, 2).to(wide) for tensor in (given["hidden_states"], times, given["B"], given["C"]))
    rows, size, channels = inputs_BND.shape
    former_BDS = inputs_BND.new_zeros(rows, channels, keys_BNS.shape[2]) if state is None else state
    steps = Steps(former_BDS, given["A"].to(wide), times_BND, times_BND * inputs_BND, keys_BNS)
    rows_B, outputs, state_BDS = torch.arange(rows, device=inputs_BND.device), [], former_BDS
    # The states of a tree's nodes, for their children; along a prompt the last one will do.
    states_NBDS = former_BDS.new_zeros(0 if tree.prompt else size, *former_BDS.shape)
    for node in range(size):
        if node and not tree.prompt:
            state_BDS = states_NBDS[tree.parents_BN[:, node].clamp(min=0), rows_B]
        now_BDS = steps.at(state_BDS, torch.full_like(rows_B, node))
        outputs.append((now_BDS @ queries_BNS[:, node, :, None])[..., 0])
        if tree.prompt:
            state_BDS = torch.where(tree.real_BN[:, node, None, None], now_BDS, state_BDS)
        else:
            states_NBDS[node] = now_BDS
    out_BDN = torch.stack(outputs, dim=-1)
    if given.get("D") is not None:
        out_BDN = out_BDN + given["D"][:, None] * inputs_BND.transpose(1, 2)
    if given.get("z") is not None:
        out_BDN = out_BDN * silu(given["z"])
    return out_BDN, Committed(state_BDS) if tree.prompt else steps


@dataclass(frozen=True)
class Scan:
    """A recurrence as transformers' layers call it."""

    tokenwise: tuple[str, ...]  # Its arguments with an entry for each token
    time: int  # Their dimension of tokens
    initial: str | None  # Its argument for the state before; None where its own code starts from none
    final: str  # Its argument that asks for the state after
    nodes: Callable[[dict[str, Any], Tensor | None, TokenTree], tuple[Tensor, Branches]]
    """The recurrence over nodes of a tree, after a given state."""


_DELTA = Scan(("query", "key", "value", "g", "beta"), 1, "initial_state", "output_final_state", delta_rule)
SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Scan(("hidden_states", "dt", "B", "C"), 1, "initial_states", "return_final_states", mamba2),
    "mamba_selective_scan": Scan(("hidden_states", "dt", "B", "C", "z"), 2, None, "return_last_state", mamba1),
}  # The recurrences by the names of transformers' functions, which all of its models share
