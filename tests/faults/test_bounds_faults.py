"""Small inputs that ask for all memory, all time or the whole stack."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from draftsmith.modules.files import json_records
from draftsmith.recipes.__main__ import main
from support.faults import Fault, Place, check, edited, ids, written
from support.tiers import some_long

PLAN = "plan --config {tiny} --out out"
GENERATE = "generate --prompt hi --artifact {artifact}"
EVALUATE = "evaluate --out e --artifact {artifact}"
TEMPLATE = GENERATE + " --target.chat_template t.jinja"
ESCAPE = "\x1b[2J\x07"
SHOWN = r"\\x1b\[2J\\x07"


def pipe(name: str) -> Callable[[Place], object]:
    """A preparation that makes a pipe to which nobody writes."""
    return lambda place: os.mkfifo(place.folder / name)


DEEP, DIGITS = "[" * 100_000, "9" * 5_000
FAULTS = [
    # Recipes and the command line.
    Fault("a value that holds itself", "plan --config r.yaml", r"distill.* or a value that holds itself; write",
          written("r.yaml", "extends: tiny\ndistill: &a\n  answered_by: *a\n")),
    Fault("a deep recipe", "plan --config r.yaml", r"more than 50 levels \(line 1\); correct it",
          written("r.yaml", f"out: {DEEP}")),
    Fault("a deep recipe of blocks", "plan --config r.yaml", r"more than 50 levels .*correct it",
          written("r.yaml", "".join(f"{' ' * level}a:\n" for level in range(60)))),
    Fault("many digits in a recipe", "plan --config r.yaml", r"a YAML file: Exceeds the limit .* digits.*correct it",
          written("r.yaml", f"extends: tiny\ntrain:\n  max_steps: {DIGITS}\n")),
    Fault("a large recipe", "plan --config r.yaml", r"r\.yaml has 1,048,590 bytes, more than 1,048,576; .*shorten it",
          written("r.yaml", "extends: tiny\n" + "#" * 2**20)),
    Fault("a deep value", PLAN, r"more than 50 levels in \[+\.\.\.; shorten it", given=("--distill.answered_by", DEEP)),
    Fault("a deep value after an equals sign", PLAN, r"more than 50 levels in \{+\.\.\.; shorten it",
          given=(f"--distill.temperatures={'{' * 90_000}",)),
    Fault("a thousand heads", PLAN + " --drafter.num_heads 1000", r"num_heads must be at most 256, got 1000; lower it"),
    Fault("a billion layers", PLAN + " --drafter.num_layers 1000000000", r"num_layers must be at most 256, got 10{9}"),
    Fault("a billion nodes", PLAN + " --tree.searched_nodes 1000000000", r"must be at most 1,024, got 10{9}; lower"),
    *(Fault(f"too large a {name.split('.')[1]}", PLAN + f" --{name} {value}",
            rf"{name.split('.')[1]} must be at most .*lower it")
      for name, value in (("train.accumulate", "1000000000000"), ("train.devices", "2000"),
                          ("train.seed", "99999999999999999999"))),
    Fault("a drawing seed of many digits", PLAN + " --distill.seed 99999999999999999999",
          r"distill\.seed must be at most 9,223"),
    Fault("a strategy of Lightning's that is not offered", PLAN + " --train.strategy ddp_spawn",
          r"train\.strategy must be one of auto, ddp, .* got 'ddp_spawn'"),
    *(Fault(f"the address {address}", PLAN, r"distill\.engine must be own or an address such as",
            given=("--distill.engine", address))
      for address in ("http://[::1/v1", "http://host:port/v1", "http://:8000/v1", "http://host:99999/v1")),
    Fault("an address of states", PLAN, r"distill\.states_from must be a folder or an address .*, got 'ftp://a/b'",
          given=("--distill.states_from", "ftp://a/b")),
    Fault("an engine whose states nobody stores", PLAN + " --batch.states computed --distill.states_from engine",
          r"distill\.states_from is engine, whose states are stored, but batch\.states is computed; set batch"),
    # Policies.
    *(Fault(f"the policy {name}", f"{GENERATE} --policy {name}", rf"in '{number}'; {kind} wants .* at most 1024; cho")
      for kind, number in (("eagle2", "999999999"), ("dyspec", "1025"), ("chain", "100000"), ("stopping", "999999999"),
                           ("sampled", "4096"), ("sampled-chain", "999999"), ("static", "2000"))
      for name in (f"{kind}-{number}",)),
    Fault("a policy of many digits", GENERATE, r"chain wants a whole number .* at most 1024; choose one",
          given=("--policy", f"chain-{DIGITS}")),
    Fault("a policy in a recipe", PLAN + " --evaluate.policies [chain-999999999]", r"at most 1024; choose one"),
    # Chat templates.
    Fault("a template of nested loops", TEMPLATE, r"the chat template fails: it takes more than 20,000 steps; .*set",
          written("t.jinja", "{% for a in range(9999) %}" * 4 + "{% if a %}{% endif %}" + "{% endfor %}" * 4)),
    Fault("a template that calls itself", TEMPLATE, r"the chat template fails: it calls itself without end; .*set",
          written("t.jinja", "{% macro f(n) %}{{ f(n + 1) }}{{ f(n) }}{% endmacro %}{{ f(0) }}")),
    Fault("a template of endless words", TEMPLATE, r"more than 20,000 steps",
          written("t.jinja", "{{ lipsum(n=10000000) }}")),
    Fault("a template with a power", TEMPLATE, r"raises a number to a power \(\*\* in line 2\).*set target",
          written("t.jinja", "a\n{{ 10 ** 10000000000 }}")),
    Fault("a template of much text", TEMPLATE, r"it writes more than 16,777,216 characters; .*set target",
          written("t.jinja", "{{ 'x' * 20000000 }}")),
    Fault("a template without an end", GENERATE + " --target.chat_template /dev/zero",
          r"/dev/zero is no ordinary file and gives more than 1,048,576 bytes; write"),
    # Prompts and other files.
    Fault("prompts from a device", EVALUATE + " --prompts /dev/zero", r"/dev/zero .* more than 1,048,576 bytes; write"),
    Fault("prompts from a silent pipe", EVALUATE + " --prompts p", r"nothing came from p for 0\.2 s; write",
          pipe("p")),
    Fault("training prompts from a pipe", PLAN + " --prompts.origin file --prompts.path p",
          r"p is no ordinary file; give one, since it may be read several times", pipe("p")),
    Fault("tools from a device", GENERATE + " --template.tools /dev/zero", r"/dev/zero .* more than 1,048,576 bytes"),
    Fault("a target's file from a pipe", "export --artifact {artifact} --format gguf --out e --target_gguf p",
          r"p is no ordinary file; give one", pipe("p")),
    Fault("a lock that is a pipe", "distill --config {tiny} --out {run} --distill.workers 1",
          r"workers\.lock is no ordinary file, .*; move it away", lambda place: os.mkfifo(place.run / "workers.lock")),
    Fault("a recipe from a pipe", "plan --config p", r"there is no recipe 'p'; give the path", pipe("p")),
    Fault("deep prompts", EVALUATE + " --prompts p.jsonl", r"p\.jsonl:1: not JSON \(nested more than 100 levels.*write",
          written("p.jsonl", '{"prompt": ' + DEEP)),
    Fault("prompts that are deep by a little", EVALUATE + " --prompts p.jsonl", r"nested more than 100 levels deep",
          written("p.jsonl", '{"prompt": ' + "[" * 200 + "]" * 200 + "}")),
    Fault("prompts of many digits", EVALUATE + " --prompts p.jsonl", r"not JSON \(a number of too many digits.*write",
          written("p.jsonl", f'{{"prompt": "hi", "question_id": {DIGITS}}}')),
    Fault("a deep list of stages", "run --config {tiny} --out {run}",
          r"stages\.json cannot be read as JSON \(nested more than 100 levels deep.*delete it",
          written("run/stages.json", DEEP)),
    Fault("a deep manifest", "train --config {tiny} --out {run}",
          r"manifest\.json cannot be read as JSON .*; delete the folder",
          written("run/data/manifest.json", DEEP)),
    # Artifacts.
    Fault("a deep artifact", GENERATE, r"cannot be read as JSON \(nested more than 100 levels deep.*copy or train",
          written("run/artifact/config.json", DEEP)),
    Fault("an artifact of many digits", GENERATE, r"cannot be read as JSON \(a number of too many digits.*copy",
          written("run/artifact/config.json", f'{{"format_version": {DIGITS}}}')),
    Fault("deep measurements", GENERATE, r"tuning\.json cannot be read as JSON .*delete it, it will be measured again",
          written("run/artifact/tuning.json", DEEP)),
    Fault("an artifact of a billion heads", GENERATE, r"num_heads must be at most 256, got 1000000000; copy or",
          edited(lambda content: content["drafter"].update(num_heads=10**9))),
    Fault("an artifact of more heads than weights", GENERATE,
          r"the tensor heads\.\S+ should be \[32.* and is absent; copy or train",
          edited(lambda content: content["drafter"].update(num_heads=200))),
    Fault("an artifact of wider outputs than weights", GENERATE, r"should be \[.* and is absent; copy or train",
          edited(lambda content: content["drafter"].update(output="copy", vocabulary_size=99))),
    Fault("an artifact of a million nodes", GENERATE, r"a tree of 1,000,001 nodes, more than 1,024; copy or train",
          edited(lambda content: content["tree"].update(parents=[-1] + [0] * 10**6, ranks=[0, *range(10**6)]))),
    # Escapes that a terminal would obey.
    Fault("an escape in the name of a recipe", "plan", rf"there is no recipe '{SHOWN}'; give",
          given=("--config", ESCAPE)),
    Fault("an escape in a value", PLAN, rf"drafter\.num_heads must be a whole number from 1 to 256, got '{SHOWN}'",
          given=("--drafter.num_heads", ESCAPE)),
    Fault("an escape in a command", ESCAPE, rf"unknown command '{SHOWN}'.*choose"),
    Fault("an escape in a key of a recipe", "plan --config r.yaml", r"unknown key .*\\u202e", written(
        "r.yaml", 'extends: tiny\n"a\\u202eb": 1\n')),
    Fault("an escape in an artifact", GENERATE, rf"folder or file {SHOWN}, .*give --target\.name",
          edited(lambda content: content["target"].update(name=ESCAPE))),
    Fault("an escape in a prompt", EVALUATE + " --prompts p.jsonl", rf"the row has none of the keys .*{SHOWN}",
          written("p.jsonl", json.dumps({ESCAPE: 1}))),
]


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are reached in a moment."""
    monkeypatch.setattr(json_records, "SILENCE", 0.2)
    monkeypatch.setattr(json_records, "STREAM_BYTES", 2**20)
    monkeypatch.setattr("draftsmith.data.prompts.chat.MOST_STEPS", 20_000)


@pytest.mark.parametrize("fault", some_long(FAULTS, 3), ids=ids(FAULTS))
def test_what_asks_for_too_much_is_refused_before_work(fault: Fault, place: Place) -> None:
    check(fault, place)


def test_prompts_may_come_from_a_pipe(place: Place) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"prompt": "hi"}\n')
    os.close(writing)
    words = [*EVALUATE.format(artifact=place.artifact).split(), "--max_new_tokens", "4", "--speed_prompts", "0"]
    assert main([*words, "--prompts", f"/dev/fd/{reading}"]) == 0, place.capfd.readouterr().err
    os.close(reading)
    assert (Path("e") / "evaluation.json").is_file()


def test_text_that_looks_deep_is_still_a_prompt(place: Place) -> None:
    assert main(["generate", "--artifact", str(place.artifact), "--max_new_tokens", "4", "--prompt", "[" * 100]) == 0
    assert "tokens per pass" in place.capfd.readouterr().err
