"""A target's own head: its guesses equal those of a plain pass, answers stay the target's, and what is no head is
refused."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    Features,
    Frontier,
    Mtp,
    MtpConfig,
    Observation,
    Policy,
    Request,
    StaticTree,
    Target,
    TargetConfig,
    Topology,
    UserError,
    baseline,
    decode,
    load_target,
)
from draftsmith.modules.target.loading.hf_folder import NativeHead
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from families.mtp.reference import head_logits
from safetensors.torch import load_file, save_file
from support.target_folders import LINES, change, load, with_head
from support.targets import random_model, recurrent_model
from support.tiers import others_long
from torch import Tensor

TOKENS = [5, 9, 13, 40, 2, 77, 31, 8, 50, 60, 61, 20]
PLACE = 7  # The last of them whose state the head reads
QUICK = ("deepseek-v3", "qwen3-next")
SHAPE = Topology((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Target]]:
    """(folder, target) of a line of models, made once."""
    @cache
    def made(line: str) -> tuple[Path, Target]:
        folder = with_head(line, tmp_path_factory.mktemp("target") / line)
        return folder, load(folder)

    return made


def expected(line: str, folder: Path, target: Target, final_LD: Tensor, guesses: list[int]) -> Tensor:
    return head_logits(line, folder, TOKENS[: PLACE + 2], final_LD[: PLACE + 1],
                       target.model.get_input_embeddings().weight, target.output_weight(), guesses)


@pytest.mark.parametrize("line", others_long(LINES, QUICK))
@torch.no_grad()
def test_the_head_equals_a_plain_pass(line: str, targets: Callable[[str], tuple[Path, Target]]) -> None:
    folder, target = targets(line)
    drafter = Mtp.create(MtpConfig(steps=3), target).eval()
    features = target.encode(Features.from_rows([(TOKENS, [True] * len(TOKENS))]))
    found, final_LD = drafter(features).hidden_BLKD[0, PLACE, :3], features.final()[0]
    plain = expected(line, folder, target, final_LD, TOKENS[PLACE + 2 : PLACE + 4])
    torch.testing.assert_close(drafter.project(found, 0), plain, atol=2e-4, rtol=1e-4)
    # While decoding: the text in two pieces, and two guesses of which the second comes after the first.
    state, rows_R = drafter.start(1, 32), torch.tensor([0])
    for first, last in ((0, 3), (3, PLACE + 1)):
        drafter.observe(state, rows_R, Observation(
            tokens_BN=torch.tensor([TOKENS[first:last]]), counts_B=torch.tensor([last - first]), taps={},
            final_BND=final_LD[None, first:last], roots_B=torch.tensor([TOKENS[last]])))
    guesses = [33, 71]
    plain = expected(line, folder, target, final_LD, guesses).log_softmax(-1)
    for depth, token in enumerate([TOKENS[PLACE + 1], *guesses]):
        number = torch.tensor([[depth]])
        scores = drafter.expand(state, Frontier(nodes_BF=number, parents_BF=number - 1,
                                                tokens_BF=torch.tensor([[token]])))
        torch.testing.assert_close(scores.log_probs_BFHQ[0, 0, 0], plain[depth], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("line", "policy"), others_long(
    [(line, policy) for line in LINES for policy in (Chain(3), StaticTree(SHAPE))],
    [("deepseek-v3", Chain(3)), ("qwen3-next", StaticTree(SHAPE))]))
def test_answers_stay_those_of_the_target(line: str, policy: Policy,
                                          targets: Callable[[str], tuple[Path, Target]]) -> None:
    _, target = targets(line)
    drafter, _ = baseline("native_head", target)
    requests = [Request((1, 9, 8, 30, 31), 0, 20), Request((1, 40, 5), 1, 14)]
    settings = DecodeSettings(batch_size=2, ignore_eos=True)
    found = decode(target, requests, settings, drafter=drafter, policy=policy)
    assert [one.tokens for one in found.generations] == [
        one.tokens for one in decode(target, requests, settings).generations]


def test_transformers_guesses_the_same(targets: Callable[[str], tuple[Path, Target]],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers decodes with no such head")
    _, target = targets("deepseek-v3")
    drafter = Mtp.create(MtpConfig(), target).eval()
    final_1LD = target.encode(Features.from_rows([(TOKENS, [True] * len(TOKENS))])).final()
    with torch.no_grad(), target.native() as model:
        # The published models have their head at layer 61.
        monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3\..*"])
        theirs = layers.MtpModel.from_pretrained(model)
        theirs_1LD = theirs.forward_layer(0, final_1LD[:, :-1], torch.arange(1, len(TOKENS))[None], None,
                                          input_ids=torch.tensor([TOKENS[1:]]))
        ours_1LD = drafter(target.encode(Features.from_rows([(TOKENS, [True] * len(TOKENS))]))).hidden_BLKD[:, :-1, 0]
    torch.testing.assert_close(ours_1LD, theirs_1LD, atol=2e-4, rtol=1e-4)


EXPERT = "model.layers.3.mlp.experts.1.up_proj.weight"
REFUSED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no head": ({"model.layers.3.eh_proj.weight": None},
                "brings no head for a token further ahead: .* holds none of the tensors mtp.fc.weight, "
                "model.layers.3.eh_proj.weight, .*; choose a target with one, or another family"),
    "a norm": ({"model.layers.3.hnorm.weight": None, "model.layers.3.shared_head.norm.weight": None},
               "lacks model.layers.3.hnorm.weight, model.layers.3.shared_head.norm.weight; copy or save"),
    "a part of the layer": ({"model.layers.3.self_attn.o_proj.weight": None},
                            "the head in .* lack model.layers.0.self_attn.o_proj.weight, which its configuration asks"),
    "an expert": ({EXPERT: None}, "the experts of the head in .* lack a tensor, or one has another shape; copy"),
    "another width": ({"model.layers.3.eh_proj.weight": torch.zeros(32, 48)},
                      r"eh_proj.weight of shape \[32, 48\], .* is 32 wide and asks for \[32, 64\]"),
    "another layer": ({"model.layers.3.self_attn.o_proj.weight": torch.zeros(32, 8)},
                      r"o_proj.weight of shape \[32, 8\], its configuration asks for"),
    "few bits": ({"model.layers.3.eh_proj.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)},
                 "eh_proj.weight in F8_E4M3, and a head is read unquantised alone"),
    "an embedding of its own": ({"model.layers.3.embed_tokens.weight": torch.zeros(100, 32)},
                                "embed_tokens.weight with other values than .*, and engines let a head read"),
    **{f"values of {name}": ({f"model.layers.3.{name}.weight": torch.full(shape, torch.nan)},
                             rf"holds model\.layers\.3\.{name}\.weight with values that are not finite")
       for name, shape in (("input_layernorm", (32,)), ("hnorm", (32,)), ("eh_proj", (32, 64)))},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_head_is_refused(name: str, tmp_path: Path, targets: Callable[[str], tuple[Path, Target]]) -> None:
    folder, target = targets("deepseek-v3")
    tensors, sentence = REFUSED[name]
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    change(tmp_path, tensors)
    with pytest.raises(UserError, match=sentence):
        Mtp.native(target, tmp_path)


def test_a_sketch_has_the_shapes_of_the_head(targets: Callable[[str], tuple[Path, Target]]) -> None:
    for line in QUICK:
        folder, target = targets(line)
        sketch = Mtp.create(MtpConfig(), sketch_target(TargetConfig(name=str(folder))))
        shapes = {name: tensor.shape for name, tensor in sketch.state_dict().items()}
        assert shapes == {name: tensor.shape for name, tensor in Mtp.native(target).state_dict().items()}


def test_the_files_that_engines_read_hold_the_head(tmp_path: Path,
                                                  targets: Callable[[str], tuple[Path, Target]]) -> None:
    folder, target = targets("qwen3-next")
    held = load_file(folder / "model.safetensors")
    head = {name: tensor for name, tensor in held.items() if name.startswith("mtp.")}
    save_file({name: torch.zeros_like(tensor) for name, tensor in head.items()}, tmp_path / "older.safetensors")
    save_file(head, tmp_path / "model-1.safetensors")
    with pytest.raises(UserError, match=r"model-1.safetensors and .*older.safetensors both hold mtp.fc.weight, and"):
        NativeHead.find(target, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(head, "model-1.safetensors")}))
    found = NativeHead.find(target, tmp_path)
    assert {*found.files.values()} == {tmp_path / "model-1.safetensors"}
    assert found.digest == NativeHead.find(target).digest
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(UserError, match=r"the weight_map of .*index.json"):
        NativeHead.find(target, tmp_path)


def test_the_head_is_that_of_the_targets_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  targets: Callable[[str], tuple[Path, Target]]) -> None:
    folder, _ = targets("qwen3-next")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("owner/model", "alone"):
        cached = tmp_path / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        for ref, commit in (("main", "a" * 40), ("older", "b" * 40)):
            shutil.copytree(folder, cached / "snapshots" / commit)
            (cached / "refs" / ref).write_text(commit)
        change(cached / "snapshots" / ("a" * 40), {"mtp.norm.weight": torch.zeros(32)})
        for revision, commit in ((None, "a" * 40), ("older", "b" * 40), ("b" * 40, "b" * 40)):
            sketch = sketch_target(TargetConfig(name=name, revision=revision))
            assert NativeHead.find(sketch).folder == cached / "snapshots" / commit
    # A head is gigabytes: none is written to be read.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    target = load_target(TargetConfig(name="alone", revision="older", dtype="bfloat16"))
    drafter, _ = baseline("native_head", target)
    assert isinstance(drafter, Mtp)
    assert not drafter.training
    assert {weight.dtype for weight in drafter.parameters()} == {torch.bfloat16}
    found_D = drafter.decoder.norm.weight
    torch.testing.assert_close(found_D, load_file(folder / "model.safetensors")["mtp.norm.weight"].bfloat16())


@pytest.mark.parametrize("kind", ["Lfm2", "GPT2", "Jamba"])
def test_a_target_whose_decoder_has_no_norm_of_that_name_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    made = random_model if kind == "GPT2" else recurrent_model
    made(kind, vocab_size=len(tiny_tokenizer())).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    given = TargetConfig(name=str(tmp_path), dtype="float32")
    for target in (load_target(given), sketch_target(given)):
        with pytest.raises(UserError, match=r"brings no head for a token further ahead: .* or another family"):
            Mtp.create(MtpConfig(), target)
    change(tmp_path, {f"mtp.{name}.weight": torch.ones(2) for name in (
        "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")})
    for target in (load_target(given), sketch_target(given)):
        with pytest.raises(UserError, match=rf"the decoder of {kind}\w* has none of that name \(norm\); choose anot"):
            Mtp.create(MtpConfig(), target)


def test_a_target_without_files_is_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="tiny-random was not read from a folder of safetensors files, which alone can"):
        baseline("native_head", tiny_target)
