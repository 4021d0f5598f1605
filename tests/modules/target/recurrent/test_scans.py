"""The recurrences over trees in float64, against the same recurrences along every path, token by token."""

from typing import Any

import pytest
import torch
from draftsmith.modules import Topology
from draftsmith.modules.target.recurrent.scans import delta_rule, linear_attention, mamba1, mamba2
from support.tree_shapes import random_trees
from torch import Tensor

ROWS, NODES = 2, 12


def along(given: dict[str, Any], row: int, path: list[int], state: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(output of the last token, state after it) by the recurrence as its paper writes it."""
    state, out = state.clone(), state
    for node in path:
        if kind == "mamba1":
            time = torch.nn.functional.softplus(given["dt"][row, :, node] + given["delta_bias"])
            value = given["hidden_states"][row, :, node]
            state = torch.exp(given["A"] * time[:, None]) * state + (time * value)[:, None] * given["B"][row, :, node]
            out = state @ given["C"][row, :, node] + given["D"] * value
            out = out * torch.nn.functional.silu(given["z"][row, :, node])
        elif kind == "mamba2":
            time = torch.nn.functional.softplus(given["dt"][row, node] + given["dt_bias"])
            value = given["hidden_states"][row, node]
            heads = len(time) // given["B"].shape[2]
            key, query = (given[name][row, node].repeat_interleave(heads, dim=0) for name in ("B", "C"))
            decay = torch.exp(given["A"] * time)[:, None, None]
            state = decay * state + (time[:, None] * value)[..., None] * key[:, None]
            out = (state * query[:, None]).sum(-1) + given["D"][:, None] * value
        else:
            heads = given["value"].shape[2] // given["key"].shape[2]
            query, key = (given[name][row, node].repeat_interleave(heads, dim=0) for name in ("query", "key"))
            query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
            decay = given["g"][row, node].exp()
            state = state * (decay[..., None] if decay.dim() == 2 else decay[:, None, None])
            error = given["value"][row, node] - (state * key[..., None]).sum(1)
            state = state + key[..., None] * (given["beta"][row, node][:, None] * error)[:, None]
            out = (state * query[..., None]).sum(1) / query.shape[-1] ** 0.5
    return out, state


def random_inputs(kind: str, generator: torch.Generator) -> dict[str, Any]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "mamba1":
        return {"hidden_states": normal(ROWS, 6, NODES), "dt": normal(ROWS, 6, NODES), "A": -normal(6, 3).exp(),
                "B": normal(ROWS, 3, NODES), "C": normal(ROWS, 3, NODES), "D": normal(6), "z": normal(ROWS, 6, NODES),
                "delta_bias": normal(6), "delta_softplus": True}
    if kind == "mamba2":
        return {"hidden_states": normal(ROWS, NODES, 4, 5), "dt": normal(ROWS, NODES, 4), "A": -normal(4).exp(),
                "B": normal(ROWS, NODES, 2, 3), "C": normal(ROWS, NODES, 2, 3), "D": normal(4), "dt_bias": normal(4),
                "dt_softplus": True}
    decays = (ROWS, NODES, 4, 5) if kind == "delta rule by channel" else (ROWS, NODES, 4)
    return {"query": normal(ROWS, NODES, 2, 5), "key": normal(ROWS, NODES, 2, 5), "value": normal(ROWS, NODES, 4, 3),
            "g": -normal(*decays).exp(), "beta": normal(ROWS, NODES, 4).sigmoid(), "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("strong", [False, True], ids=["", "strong decays"])
@pytest.mark.parametrize("kind", ["delta rule", "delta rule by channel", "mamba2", "mamba1"])
def test_every_node_follows_its_path(kind: str, strong: bool) -> None:
    """Two passes: the second starts from the states that a commit of the first left."""
    generator = torch.Generator().manual_seed(0)
    nodes = {"mamba1": mamba1, "mamba2": mamba2}.get(kind, delta_rule)
    state: Tensor | None = None
    for _ in range(2):
        tree, given = random_trees(ROWS, NODES, generator), random_inputs(kind, generator)
        if strong:
            # Decays that differ by factors no number format holds: what is not above a node must not reach it.
            for name in ("g", "A"):
                if name in given:
                    given[name] = 400 * given[name]
        out, branches = nodes(given, state, tree)
        shape = {"mamba1": (6, 3), "mamba2": (4, 5, 3)}.get(kind, (4, 5, 3))
        before = torch.zeros(ROWS, *shape, dtype=torch.float64) if state is None else state
        for row in range(ROWS):
            for node in range(NODES):
                path = tree.ancestors_BNN[row, node].nonzero()[:, 0].tolist()
                expected, after = along(given, row, path, before[row], kind)
                found = out[row, :, node] if kind == "mamba1" else out[row, node]
                torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-11)
                padded = torch.tensor([path + [0] * (NODES - len(path))] * ROWS)
                left = branches.after(padded, torch.full((ROWS,), len(path)))
                torch.testing.assert_close(left[row], after, atol=1e-12, rtol=1e-11)
        ends = [tree.ancestors_BNN[row, NODES - 1 - row].nonzero()[:, 0].tolist() for row in range(ROWS)]
        counts = torch.tensor([len(path) for path in ends])
        state = branches.after(torch.tensor([path + [0] * (NODES - len(path)) for path in ends]), counts)


@pytest.mark.parametrize("strongest", [16.0, 1600.0, 1e6])
def test_weak_decays_after_strong_ones_keep_their_digits(strongest: float) -> None:
    """The sum of a long path's decays is large, and what counts is a difference of two such sums."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 64, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    query, key = (part / part.norm(dim=-1, keepdim=True) for part in (query, key))
    decays = torch.full((1, 1, 64, 1), -0.05, dtype=torch.float64)
    decays[:, :, ::4] = -strongest
    given = (query, key, value, decays, torch.full_like(decays, 0.5))
    tree = Topology.chain(63).plant(torch.zeros(1, 64, dtype=torch.int64))
    expected, wide = linear_attention(*given, None, tree)
    found, narrow = linear_attention(*(part.float() for part in given), None, tree)
    path = torch.arange(64)[None], torch.tensor([64])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(narrow.after(*path).double(), wide.after(*path), atol=2e-6, rtol=1e-5)
