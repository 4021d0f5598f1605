"""States from another engine: those of the target itself, whatever was killed; wrong engines are refused in a
sentence."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, distill, state_engines
from draftsmith.data.answers import answer_server
from draftsmith.data.datamodule import BatchConfig, DraftDataModule
from draftsmith.data.state_engines import PROBE, engine_at, probe
from draftsmith.data.store.feature_store import Encoding
from draftsmith.modules import Target, UserError
from safetensors.torch import load_file
from support.data.data_folders import contents, encode, many, write_prompts
from support.data.servers import States, StatesServer, serving, working

TAPS = (0,)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_server, "PAUSES", (0.01,))
    monkeypatch.setattr(state_engines, "TAKEN_SECONDS", 0.2)
    monkeypatch.setattr(state_engines, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(state_engines, "POLL_SECONDS", 0.001)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Two shards of answers without states."""
    folder = tmp_path_factory.mktemp("answers")
    config = DistillConfig(shard_prompts=4, slots=4, max_new_tokens=8, validation_prompts=2)
    distill(tiny_target, write_prompts(folder, many(6)), config, ChatTemplate(tiny_target.tokenizer), folder / "data",
            progress=False)
    return folder / "data"


@pytest.fixture
def data(answers: Path, tmp_path: Path) -> Path:
    """The same in a folder of the test's own."""
    return shutil.copytree(answers, tmp_path / "data")


def stored(target: Target, data: Path, place: str) -> None:
    """Probe an engine and store its states, as a run does."""
    engine = engine_at(place, target)
    encoding = Encoding(target, data, TAPS, read=engine)
    probe(engine, encoding)
    encoding.run(progress=False)


def require_own_states(target: Target, data: Path, tmp_path: Path) -> None:
    """The stored states are those that the target computes."""
    found = {file.name: load_file(file)["states"] for file in (*data.glob("final-*"), *data.glob("tap_*"))}
    (tmp_path / "own").mkdir()
    for file in (data / "manifest.json", *data.glob("train-*"), *data.glob("validation-*")):
        (tmp_path / "own" / file.name).write_bytes(file.read_bytes())
    for file in encode(target, tmp_path / "own", TAPS):
        torch.testing.assert_close(found.pop(file.name), load_file(file)["states"])
    assert not found


def test_the_guides_engine_gives_the_targets_states(data: Path, tiny_target: Target, tmp_path: Path) -> None:
    with working(tmp_path / "engine") as answered:
        stored(tiny_target, data, str(tmp_path / "engine"))
    assert len(answered) == 1 + len(Manifest.load(data).shards), "the trial, and a request for each shard"
    assert not list((tmp_path / "engine").iterdir()), "nothing stays in shared memory"
    require_own_states(tiny_target, data, tmp_path)
    assert DraftDataModule(data, BatchConfig(row_length=128), TAPS).packed_batch(0).to("cpu").final_BLD is not None


def test_vllm_gives_the_targets_states(data: Path, tiny_target: Target, tmp_path: Path) -> None:
    with serving(StatesServer(tiny_target, ids=(1, 2), folder=tmp_path)) as server:
        stored(tiny_target, data, f"{server.address}/v1")
    assert {(one["max_tokens"], one["temperature"]) for one in server.received} == {(1, 0.0)}
    assert not list(tmp_path.glob("cmpl-*")), "read files go"
    require_own_states(tiny_target, data, tmp_path)


def test_a_run_that_is_killed_at_any_write_loses_no_shard(data: Path, tiny_target: Target, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    replace, moves, fatal = Path.replace, 0, 0

    def killed(self: Path, to: Path) -> Path:
        nonlocal moves
        moves += "engine" not in str(to)
        if moves == fatal:
            raise KeyboardInterrupt
        return replace(self, to)

    with working(tmp_path / "engine") as answered:
        stored(tiny_target, data, str(tmp_path / "engine"))
        whole = contents(data)
        for file in (*data.glob("final-*"), *data.glob("tap_*"), data / PROBE, data / "features.json"):
            file.unlink()
        asked, ends = len(answered), 0
        monkeypatch.setattr(Path, "replace", killed)
        while ends < 20:
            moves, fatal = 0, fatal + 1
            try:
                stored(tiny_target, data, str(tmp_path / "engine"))
            except KeyboardInterrupt:
                ends += 1
                continue
            break
    assert ends >= 4, "the trial and each shard are listed apart"
    assert contents(data) == whole
    assert len(answered) - asked <= 2 * ends + 2


def test_without_an_engine_the_run_ends_in_a_sentence_and_goes_on_later(data: Path, tiny_target: Target, tmp_path: Path
                                                                        ) -> None:
    place = tmp_path / "engine"
    with pytest.raises(UserError, match=r"no engine takes requests in .*engine \(for 0.2 seconds none did\); start"):
        stored(tiny_target, data, str(place))
    assert not list(place.iterdir()), "nobody waits for it any more"
    (place / "busy.taken").touch()
    with pytest.raises(UserError, match=r"no engine answers requests in .* \(for 0.5 seconds none did\)"):
        stored(tiny_target, data, str(place))
    (place / "busy.taken").unlink()
    with pytest.raises(UserError, match=r"127.0.0.1:9/v1 does not answer .* finished shards are kept"):
        stored(tiny_target, data, "http://127.0.0.1:9/v1")
    with working(place):
        stored(tiny_target, data, str(place))
    assert DraftDataModule(data, BatchConfig(row_length=128), TAPS)


def another(states: States) -> States:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(state.shape, generator=generator) for name, state in states.items()}


WRONG: dict[str, tuple[Callable[[States], States], str]] = {
    "another layer": (lambda one: {**one, "tap_0": one["final"]},
                      r"gives the last state, after the last norm, where the output of layer 0 is asked for; correct"),
    "another model": (another, r"does not give the target's states: the last state, .* differs by .* of its length, "
                               r"and rounding in float32 explains 0.002; serve tiny"),
    "a kind is missing": (lambda one: {"final": one["final"]}, r"gives no tap_0 \(it gives final\)"),
    "another width": (lambda one: {name: state[:, 1:] for name, state in one.items()},
                      r"gives final as float32 of shape \(\d+, 31\), not as .* of shape \(\d+, 32\)"),
    "whole numbers": (lambda one: {name: state.int() for name, state in one.items()}, r"gives final as int32"),
    "values that are none": (lambda one: {name: state / 0 for name, state in one.items()}, r"in final .* not finite"),
    "half of a file": (lambda one: {}, r"cannot be read as a safetensors file .*; an engine writes it under another"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_states_are_refused(data: Path, tiny_target: Target, tmp_path: Path, name: str) -> None:
    change, message = WRONG[name]
    with (working(tmp_path / "engine", change), pytest.raises(UserError, match=message)):
        stored(tiny_target, data, str(tmp_path / "engine"))
    assert not list(data.glob("final-*")), "nothing is stored"


def swapped(change: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda answer: {**answer, **change}


SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer layers": ({"ids": (2,)}, r"and 2 of each token are asked for; start vLLM .*layer_ids \[1, 2\]"),
    "another layer": ({"ids": (2, 2)}, r"gives the output of layer 1, the last one, before the norm, where the output "
                                       r"of layer 0 is asked for"),
    "another method": ({"change": swapped({"kv_transfer_params": None})}, r"names no file of states .*start vLLM with"),
    "another folder": ({"change": swapped({"kv_transfer_params": {"hidden_states_path": "/no/a.safetensors"}})},
                       r"cannot be read and removed \(/no/a.safetensors: .*its shared_storage_path must be a folder"),
}


@pytest.mark.parametrize("name", SERVED)
def test_wrong_servers_are_refused(data: Path, tiny_target: Target, tmp_path: Path, name: str) -> None:
    given, message = SERVED[name]
    server = StatesServer(tiny_target, **{"ids": (1, 2), **given}, folder=tmp_path)
    with serving(server), pytest.raises(UserError, match=message):
        stored(tiny_target, data, f"{server.address}/v1")


def test_states_before_the_last_norm_are_named(data: Path, tiny_target: Target, tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def unnormed(states: States) -> States:
        # Tap 1 is the output of the last layer, which the engine saves of the same text.
        return {**states, "final": kept.setdefault("layer", states["tap_1"])}

    engine = engine_at(str(tmp_path / "engine"), tiny_target)
    with working(tmp_path / "engine", unnormed), pytest.raises(
            UserError, match="gives the output of layer 1, the last one, before the norm, where the last state, after "
                             "the last norm, is asked for; correct the layers that it takes, or its last norm"):
        probe(engine, Encoding(tiny_target, data, (1,), read=engine))


def test_the_targets_own_states_of_the_trial_are_kept(data: Path, tiny_target: Target, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    with working(tmp_path / "engine", seed=1), pytest.raises(UserError, match="does not give the target's states"):
        stored(tiny_target, data, str(tmp_path / "engine"))
    monkeypatch.setattr(state_engines, "read_rows", None)
    with working(tmp_path / "engine"):
        stored(tiny_target, data, str(tmp_path / "engine"))
