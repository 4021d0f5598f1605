"""Rows of many thousand tokens: no mask of all positions, the same losses and gradients, and memory by the token."""

from pathlib import Path

import pytest
import torch
from draftsmith.data.store.collate import Piece, packed
from draftsmith.modules import Features, Target
from support.cases import gradients, module_of
from support.families import CASES
from support.processes import python
from support.tiers import others_long

DENSE = "draftsmith.modules.target.attention.segment_attention.DENSE_LENGTH"
SCRIPT = Path(__file__).resolve().parents[1] / "references" / "long_row.py"


def two_rows(target: Target) -> Features:
    """A row of three conversations, and one of a window that starts amid its conversation, padded."""
    def piece(length: int, first: int = 0) -> Piece:
        tokens_N = torch.randint(4, target.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
        return Piece(tokens_N=tokens_N, supervised_N=torch.arange(length) % 5 > 1, first=first)

    return packed([[piece(9), piece(14), piece(7)], [piece(19, first=6), piece(6)]], 33).to("cpu")


@pytest.mark.parametrize("name", others_long(
    [name for name in CASES if name not in ("draft-lm-depths", "mtp", "mtp-reduced")]))
def test_long_rows_learn_as_short_ones_do(name: str, tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask tokens of draft models, and steps of a target's own head after the first one, keep the mask of all
    positions."""
    module, batch = module_of(CASES[name], tiny_target_f64), two_rows(tiny_target_f64)
    expected, dense = gradients(module, [batch])
    monkeypatch.setattr(DENSE, 0)
    monkeypatch.setattr(Features, "visible", None)
    found, inside = gradients(module, [batch])
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    assert inside.keys() == dense.keys()
    for weight, gradient in dense.items():
        torch.testing.assert_close(inside[weight], gradient, atol=1e-9, rtol=1e-9)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("family", "bound"), [("eagle3", 400), ("kangaroo", 200)])
def test_a_step_on_32768_tokens_takes_memory_by_the_token(family: str, bound: int) -> None:
    """One boolean mask of all positions takes 1,024 MiB; the whole step took 275 MiB (EAGLE-3) and 129 (Kangaroo)."""
    answer = python(str(SCRIPT), family, "32768")
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert float(answer.stdout) < bound
