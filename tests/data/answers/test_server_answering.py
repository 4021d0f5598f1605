"""Answers from a server: those of the target itself, wrong servers are refused, and a run outlives its server."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, Prompt, PromptConfig, WantedStates, distill
from draftsmith.data.answers import answer_server
from draftsmith.data.answers.answer_server import PROBES, AnswerServer, ServerAnswerer
from draftsmith.data.answers.shard_queue import QUEUE
from draftsmith.modules import DecodeSettings, Target, UserError
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.data.data_folders import contents, encode, many, rows, write_prompts
from support.data.servers import Change, Server, serving
from support.tiers import some_long

SMALL = DistillConfig(shard_prompts=4, slots=4, max_new_tokens=24, validation_prompts=2, test_prompts=1)
PATHS = ("/v1", "/generate")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_server, "PAUSES", (0.01, 0.01))


def asking(server: Server, path: str = "/v1") -> DistillConfig:
    return replace(SMALL, engine=server.address + path)


def run(target: Target, prompts: PromptConfig, config: DistillConfig, out: Path, **more: Any) -> Manifest:
    return distill(target, prompts, config, ChatTemplate(target.tokenizer), out, progress=False, **more)


def other_target() -> Target:
    return Target(tiny_model(seed=1), tiny_tokenizer(), name="other")


def choice(**changes: Any) -> Change:
    """A server whose completion has other fields."""
    return lambda response: {"choices": [{**response["choices"][0], **changes}]}


def without_end(response: dict[str, Any]) -> dict[str, Any]:
    """A server that leaves the end token out of the token ids."""
    [one] = response["choices"]
    ended = one["finish_reason"] == "stop"
    return {"choices": [{**one, "token_ids": one["token_ids"][:-1] if ended else one["token_ids"]}]}


# Right servers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", some_long(PATHS, 9, 1))
@pytest.mark.parametrize("workers", some_long([None, 2], 2))
def test_the_data_are_those_of_the_target_itself(tmp_path: Path, tiny_target: Target, path: str,
                                                 workers: int | None) -> None:
    prompts, states = write_prompts(tmp_path, many(16)), [WantedStates(taps=(1,))]
    own = run(tiny_target, prompts, replace(SMALL, workers=workers), tmp_path / "own", states=states)
    with serving(Server(tiny_target)) as server:
        found = run(tiny_target, prompts, replace(asking(server, path), workers=workers), tmp_path / "served",
                    states=states)
    assert found.shards == own.shards
    assert found.recipe["distill"]["engine"] == "server", "an address is one machine's"
    assert list(rows(tmp_path / "served")) == list(rows(tmp_path / "own"))
    encode(tiny_target, tmp_path / "served", (1,))
    assert sorted(contents(tmp_path / "served")) == sorted(contents(tmp_path / "own"))


def test_the_server_is_told_everything_that_decides_an_answer(tmp_path: Path, tiny_target: Target,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_SERVER_KEY", "s3cret")
    prompts = write_prompts(tmp_path, many(7))
    with serving(Server(tiny_target)) as server:
        config = replace(asking(server), temperatures=(0.7,), top_p=0.9, top_k=7)
        run(tiny_target, prompts, config, tmp_path / "out")
        run(tiny_target, prompts, config, tmp_path / "again")
    assert contents(tmp_path / "out") == contents(tmp_path / "again"), "seeds follow from the recipe"
    asked = server.received[len(PROBES) : len(PROBES) + 4]
    assert [one["temperature"] for one in asked] == [0.7] * 4
    assert len({one["seed"] for one in asked}) == 4
    for one in server.received:
        assert (one["top_p"], one["top_k"], one["min_p"], one["repetition_penalty"]) == (0.9, 7, 0.0, 1.0)
        assert one["stop_token_ids"] == list(tiny_target.eos_ids)
        assert one["return_token_ids"] is True
        assert one["authorization"] == "Bearer s3cret"


@pytest.mark.long
def test_an_end_token_that_a_server_leaves_out_is_added(tmp_path: Path, tiny_target: Target) -> None:
    prompts, found = write_prompts(tmp_path, many(30)), []
    for name, change in (("all", dict), ("fewer", without_end)):
        with serving(Server(tiny_target, change=change)) as server:
            config = replace(asking(server), temperatures=(1.0,), max_new_tokens=64)
            found.append(run(tiny_target, prompts, config, tmp_path / name))
    assert found[0].total("train", "answers") > found[0].total("train", "truncated"), "no answer ends"
    assert found[0].shards == found[1].shards


def test_a_server_that_fails_now_and_then_is_asked_again(tmp_path: Path, tiny_target: Target) -> None:
    with serving(Server(tiny_target, failures=2, status=503)) as server:
        config = replace(asking(server), slots=1)
        assert run(tiny_target, write_prompts(tmp_path, many(9)), config, tmp_path / "out").complete


def test_differences_within_rounding_are_reported(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(answer_server, "STEPS", 1e9)
    with serving(Server(other_target())) as server, caplog.at_level(logging.WARNING):
        run(tiny_target, write_prompts(tmp_path, many(9)), asking(server), tmp_path / "out")
    assert "of 8 answers of http://127.0.0.1" in caplog.text
    assert "leave the target's own at a near-tie (logits that differ by up to" in caplog.text


def test_no_request_is_sent_after_the_deadline(tmp_path: Path, tiny_target: Target) -> None:
    prompts = write_prompts(tmp_path, many(9))
    with serving(Server(tiny_target)) as server:
        config = replace(asking(server), budget_minutes=1e-9, slots=2)
        manifest = run(tiny_target, prompts, config, tmp_path / "out")
    assert len(server.received) == len(PROBES) + 2, "but those of the first batch, which are answered whole"
    assert manifest.total("train", "prompts") == 2


def test_a_late_server_gets_the_least_share_alone(tiny_target: Target) -> None:
    prompts = [(number, Prompt.from_turns(row["prompt"], id=str(number))) for number, row in enumerate(many(9))]
    with serving(Server(tiny_target)) as server:
        given = AnswerServer(f"{server.address}/v1"), tiny_target, ChatTemplate(tiny_target.tokenizer)
        answerer = ServerAnswerer(*given, DecodeSettings(batch_size=4), 8, lambda _: None)
        found = answerer.answer(prompts, (0.0, 1.0), time.monotonic() - 1, assured={0, 1, 2}, every=True)
    assert len(server.received) == 6
    assert [(one.number, one.temperature) for one in found] == [
        (number, temperature) for temperature in (0.0, 1.0) for number in range(3)]


def test_a_servers_pace_says_nothing_of_held_out_answers(tmp_path: Path, tiny_target: Target) -> None:
    with serving(Server(tiny_target)) as server:
        config = replace(asking(server), validation_prompts=14, budget_minutes=600.0)
        manifest = run(tiny_target, write_prompts(tmp_path, many(20)), config, tmp_path / "out")
    assert manifest.total("validation", "prompts") == 12


# Wrong servers -------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Change, str]] = {
    "text alone": (choice(token_ids=None), r"returned no token ids.*return_token_ids.*set distill.engine: own"),
    "no choices": (lambda _: {"text": "hi"}, r"returned no token ids"),
    "token ids of text": (choice(token_ids=["a"]), r"returned no token ids"),
    "a token of another vocabulary": (choice(token_ids=[10**6]), r"wrote token 1000000, and the target's ids are 0 to"),
    "another prompt": (choice(prompt_token_ids=[1]), r"read another prompt than it was given, \[1\]; set"),
    "a cut answer": (choice(token_ids=[5], finish_reason="length"),
                     r"ended an answer after 1 of 32 tokens without end token \(length\); raise its context"),
    "a closed connection": (lambda _: None, r"does not answer \(.*\); start the server and the same command again"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_responses_are_refused(tmp_path: Path, tiny_target: Target, name: str) -> None:
    change, message = WRONG[name]
    with serving(Server(tiny_target, change=change)) as server, pytest.raises(UserError, match=message):
        run(tiny_target, write_prompts(tmp_path, many(9)), asking(server), tmp_path / "out")
    assert not list((tmp_path / "out").glob("train-*"))


@pytest.mark.parametrize("path", PATHS)
def test_another_model_is_refused(tmp_path: Path, tiny_target: Target, path: str) -> None:
    message = (r"does not answer as the target does: after \d+ tokens of an answer to '.*' it writes '.*' where the "
               r"target writes '.*', whose logit is larger by .* \(rounding explains .*\); serve tiny-random, or set")
    with serving(Server(other_target())) as server, pytest.raises(UserError, match=message):
        run(tiny_target, write_prompts(tmp_path, many(9)), asking(server, path), tmp_path / "out")


@pytest.mark.parametrize(("status", "message"), [
    (500, r"does not answer \(status 500: .*out of order.*finished shards are kept"),
    (404, r"refuses a request \(status 404: .*correct the address"),
])
def test_a_server_that_always_fails_is_named(tmp_path: Path, tiny_target: Target, status: int, message: str) -> None:
    with serving(Server(tiny_target, failures=10**6, status=status)) as server, pytest.raises(UserError, match=message):
        run(tiny_target, write_prompts(tmp_path, many(9)), asking(server), tmp_path / "out")


def test_a_slow_server_is_given_up(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_server, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(answer_server, "PAUSES", ())
    with serving(Server(tiny_target, seconds=1.0)) as server, pytest.raises(UserError, match=r"not answer \(timed out"):
        run(tiny_target, write_prompts(tmp_path, many(9)), asking(server), tmp_path / "out")


def test_where_no_server_is_one_is_asked_for(tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    """Each try is a request of its own, which no proxy has changed."""
    made, request = list[str](), answer_server.urllib.request.Request
    monkeypatch.setattr(answer_server.urllib.request, "Request", lambda *of: made.append(of[0]) or request(*of))
    with serving(Server(tiny_target)) as server:
        config = asking(server)
    with pytest.raises(UserError, match=r"does not answer \(.*refused.*start the server"):
        run(tiny_target, write_prompts(tmp_path, many(9)), config, tmp_path / "out")
    assert len(made) == len(answer_server.PAUSES) + 1


@pytest.mark.long
def test_finished_shards_outlive_the_server(tmp_path: Path, tiny_target: Target) -> None:
    prompts, out = write_prompts(tmp_path, many(30)), tmp_path / "out"
    left = [len(PROBES) + 9]

    def dying(response: dict[str, Any]) -> dict[str, Any] | None:
        left[0] -= 1
        return response if left[0] >= 0 else None

    with serving(Server(tiny_target, change=dying)) as server:
        with pytest.raises(UserError, match="does not answer"):
            run(tiny_target, prompts, asking(server), out)
        assert len(list((out / QUEUE).glob("train-*.json"))) == 2, "finished, in no manifest yet"
    with serving(Server(tiny_target)) as server:
        run(tiny_target, prompts, asking(server), out)
        assert len(server.received) == len(PROBES) + 30 - 3 - 8, "only what was missing"
        run(tiny_target, prompts, asking(server), tmp_path / "calm")
    assert contents(out) == contents(tmp_path / "calm")
