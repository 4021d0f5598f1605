"""Draft language models that read the target's states (PARD-2): training, decoding, memory and their layout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.export.layouts.registry import import_drafter
from draftsmith.modules import DraftLM, DraftLMConfig, Features, Target, UserError
from draftsmith.modules.families.draft_lm import drafter as draft_file
from draftsmith.modules.parts import causal_drafter
from families.draft_lm.test_draft_lm import DEPTHS, exported, made, two_turns
from safetensors.torch import load_file, save_file
from support.answers import frontier, news, observed
from support.targets import random_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

TAPS = replace(DEPTHS, taps=(0,))


def reading(config: DraftLMConfig, target: Target) -> DraftLM:
    """A drafter whose projection matters as much as its embeddings."""
    drafter = made(config, target)
    with torch.no_grad():
        drafter.target_proj.weight.mul_(20.0)
    return drafter


def test_a_new_projection_adds_nothing_and_a_start_keeps_its_columns(tiny_target: Target) -> None:
    plain = made(DEPTHS, tiny_target)
    text = tiny_target.encode(two_turns(), (0,))
    with torch.no_grad():
        expected = plain(text).hidden_BLKD
        fresh = DraftLM.create(TAPS, tiny_target, start=plain).eval()
        assert fresh.reads_states
        assert torch.equal(fresh(text).hidden_BLKD, expected)
        former = reading(replace(TAPS, taps=()), tiny_target)
        wider = DraftLM.create(TAPS, tiny_target, start=former).eval()
        torch.testing.assert_close(wider(text).hidden_BLKD, former(text).hidden_BLKD, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(former(text).hidden_BLKD, expected, atol=1e-2)


def test_states_of_a_pass_are_those_before_each_token_and_the_anchors(tiny_target: Target) -> None:
    """One pass per anchor over its text and mask tokens, with the states written out."""
    drafter, tokens = reading(TAPS, tiny_target), [5, 9, 11, 20, 7]
    encoded = tiny_target.encode(Features.from_rows([(tokens, [True] * 5)]), (0,))
    with torch.no_grad():
        read = torch.cat([encoded.taps[0][0], encoded.final()[0]], -1)
        added = torch.cat([torch.zeros(1, 32), 0.02 * read @ drafter.target_proj.weight.T])
        found = drafter(encoded).hidden_BLKD[0]
        for anchor in range(5):
            for depth in range(3):
                places = [*range(anchor + 1), *[anchor] * depth]
                inputs = drafter.embed(torch.tensor([tokens[: anchor + 1] + [-1] * depth])) + added[places]
                order = torch.arange(len(places))[None]
                causal = torch.ones(1, len(places), len(places), dtype=torch.bool).tril()
                expected = drafter._states(inputs, causal, order, order)[0, -1]
                torch.testing.assert_close(found[anchor, depth], expected, atol=1e-5, rtol=1e-4)


def test_drafts_read_the_states_that_the_target_gave(tiny_target: Target) -> None:
    """Long and short observations, with and without drafts between them, and rows that move."""
    drafter = reading(TAPS, tiny_target)
    tokens = torch.randint(4, 90, (2, 60), generator=torch.Generator().manual_seed(3)).tolist()
    text = tiny_target.encode(Features.from_rows([(row, [True] * 60) for row in tokens]), (0,))
    with torch.no_grad():
        expected = torch.stack([drafter.project(drafter(text).hidden_BLKD[:, :, depth], depth) for depth in range(3)],
                               2).log_softmax(-1)
    state, ends = drafter.start(2, 64), [0, 0]
    for steps, drafts in (((3, 21), True), ((2, 4), False), ((17, 1), False), ((1, 2), True), ((20, 9), True)):
        drafter.observe(state, torch.tensor([0, 1]), observed(text, [0, 1], ends, list(steps)))
        ends = [end + step for end, step in zip(ends, steps, strict=True)]
        if drafts:
            roots = [[row[end]] for row, end in zip(tokens, ends, strict=True)]
            found = drafter.expand(state, frontier([0], [-1], roots)).log_probs_BFHQ[:, 0]
            for row, end in enumerate(ends):
                torch.testing.assert_close(found[row], expected[row, end], atol=1e-4, rtol=1e-3)
    state.keep(torch.tensor([1]))
    drafter.observe(state, torch.tensor([0]), observed(text, [1], [ends[1]], [4]))
    found = drafter.expand(state, frontier([0], [-1], [[tokens[1][ends[1] + 4]]])).log_probs_BFHQ[0, 0]
    torch.testing.assert_close(found, expected[1, ends[1] + 4], atol=1e-4, rtol=1e-3)


def test_some_training_texts_go_without(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, text = reading(TAPS, tiny_target).train(), tiny_target.encode(two_turns(), (0,))
    monkeypatch.setattr(draft_file, "DROPPED", 0.5)
    given = torch.stack([drafter._given_text(text)[0] for _ in range(40)]).abs().sum(-1) > 0
    assert not given[:, [0, 6, 11, 12]].any()
    # Whole conversations, each for itself.
    assert torch.equal(given[:, 1:6].all(1), given[:, 1:6].any(1))
    assert {tuple(pair) for pair in torch.stack([given[:, 1], given[:, 7]], 1).tolist()} == {
        (one, other) for one in (False, True) for other in (False, True)}


@pytest.mark.parametrize("window", [None, 4])
def test_long_rows_need_no_mask_of_text_and_mask_tokens(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target(2, head_dim=8, **({} if window is None else {"sliding_window": window}))
    drafter = reading(replace(TAPS, layers=(0, 1), num_layers=None, hidden_size=None), target)
    segments = torch.tensor([[0] * 13 + [1] * 9 + [-1] * 2, [0] * 4 + [1] * 20])
    positions = torch.tensor([[*range(13), *range(9), 0, 0], [*range(4), *range(20)]])
    text = target.encode(Features(
        tokens_BL=torch.randint(4, 90, (2, 24)), supervised_BL=segments >= 0, segments_BL=segments,
        positions_BL=positions), (0,))
    found = []
    for longest in (2048, 0):
        monkeypatch.setattr(draft_file, "DENSE_LENGTH", longest)
        monkeypatch.setattr(causal_drafter, "QUERIES", 5)
        drafter.zero_grad()
        hidden = drafter(text).hidden_BLKD
        (hidden[segments >= 0] * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
        found.append((hidden.detach()[segments >= 0], drafter.decoder.layers[0].self_attn.k_proj.weight.grad.clone(),
                      drafter.target_proj.weight.grad.clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_memory_of_a_long_row_is_linear(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has a place for each pair of tokens: the largest grows with the row."""
    drafter, sizes = reading(TAPS, tiny_target).train(), []
    monkeypatch.setattr(draft_file, "DENSE_LENGTH", 0)
    for length in (512, 1024):
        text = tiny_target.encode(Features.from_rows([(([7, 8, 9, 10] * length)[:length], [True] * length)]), (0,))
        largest = Largest()
        with largest:
            drafter(text).hidden_BLKD.sum().backward()
        sizes.append(largest.elements)
    assert sizes[1] < 2.2 * sizes[0]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes())
        return out


# The layout -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def officially(folder: Path, target: Target, tokens: list[int], count: int) -> torch.Tensor:
    """Logits of the drafted tokens as PARD-2's decoding code computes them, from the files of a folder."""
    model, said = AutoModelForCausalLM.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    assert (said["pard2"], said["spd_type"], said["pard2_proj_bias"]) == (True, "pard2", False)
    weight = load_file(folder / "pard_warp_model" / "model.safetensors")["target_proj.weight"]
    with target.native() as native:
        states = native(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    read = torch.cat([states[layer] for layer in said["pard2_target_layers"]], -1)
    read = torch.cat([torch.zeros_like(read[:, :1]), read], 1)
    read = torch.cat([read] + [read[:, -1:]] * (count - 1), 1).float()
    inputs = model.get_input_embeddings()(torch.tensor([tokens + [said["pard_token"]] * (count - 1)]))
    assert read.shape[-1] == said["pard2_target_dim"] == weight.shape[1]
    return model(inputs_embeds=inputs + said["pard2_scale"] * read @ weight.T).logits[0, -count:]


def pard2_folder(target: Target, out: Path) -> tuple[DraftLM, Path]:
    """A draft that reads three states of a target of five layers, and its export."""
    drafter = reading(replace(TAPS, taps=(0, 2), mask_token_id=3), target)
    return drafter, exported(drafter, target, out)


def test_an_exported_draft_reads_states_as_the_official_code_does(tmp_path: Path) -> None:
    target, tokens = random_target(5), [5, 9, 11, 20, 7, 33]
    drafter, folder = pard2_folder(target, tmp_path / "draft")
    assert json.loads((folder / "config.json").read_text())["pard2_target_layers"] == [-5, -3, -1]
    state = drafter.start(1, 64)
    drafter.observe(state, torch.tensor([0]), news(target.encode(Features.from_rows([(tokens, [True] * 6)]), (0, 2)),
                                                   0, 5))
    found = drafter.expand(state, frontier([0], [-1], [[tokens[-1]]])).log_probs_BFHQ[0, 0]
    expected = officially(folder, target, tokens, 3).log_softmax(-1)
    torch.testing.assert_close(found.float(), expected.float(), atol=1e-4, rtol=1e-3)
    # Read again, also where the states stand in another order, count from the front and have another scale.
    said, file = json.loads((folder / "config.json").read_text()), folder / "pard_warp_model" / "model.safetensors"
    weight = load_file(file)["target_proj.weight"].unflatten(1, (3, -1))
    said |= {"pard2_target_layers": [-1, 1, 3], "pard2_scale": 0.01}
    save_file({"target_proj.weight": 2.0 * weight[:, [2, 0, 1]].flatten(1)}, file)
    (folder / "config.json").write_text(json.dumps(said))
    again = import_drafter("huggingface", folder, target)
    assert isinstance(again, DraftLM)
    assert again.config.taps == (0, 2)
    torch.testing.assert_close(again.target_proj.weight, drafter.target_proj.weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again.mask_embedding, drafter.mask_embedding, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("change", "told"), [
    ({"spd_type": "pard3"}, "spd_type 'pard3'.*another version of PARD-2's layout"),
    ({"pard2_ml": True}, "has pard2_ml: it is of another version"),
    ({"pard2_target_layers": None}, "pard2_target_layers None: it is of another version"),
    ({"pard2_target_layers": [-1, -8, -16]}, r"reads the states \[-1, -8, -16\].*has 5 layers"),
    ({"pard2_target_dim": 16384}, "of 16384 numbers, and"), ({"pard2_proj_bias": True}, "pard2_proj_bias True"),
    ({"pard_token": None, "draftsmith_depths": None}, "names no mask token"),
    ("no projection", "holds no projection .* warp_model.bin is a pickle"),
])
def test_another_version_of_the_layout_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    target = random_target(5)
    _, folder = pard2_folder(target, tmp_path / "draft")
    if change == "no projection":
        shutil.rmtree(folder / "pard_warp_model")
    else:
        said = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps({key: one for key, one in said.items() if one is not None}))
    with pytest.raises(UserError, match=told):
        import_drafter("huggingface", folder, target)


def test_a_state_that_transformers_does_not_number_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reads the output of the last layer \(1\)"):
        exported(reading(replace(TAPS, taps=(1,), mask_token_id=3), tiny_target), tiny_target, tmp_path / "draft")
