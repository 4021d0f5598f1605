"""Wrong recipe files, wrong settings and wrong names of draft policies."""

import os
from pathlib import Path

import pytest
from support.faults import Fault, Place, check, ids, written
from support.tiers import some_long

FAULTS = [
    Fault("a recipe that is not there", "run --config gone", r"there is no recipe 'gone'; give the path"),
    Fault("a recipe of a list", "run --config r.yaml", r"r\.yaml must hold the sections of a recipe .*got list",
          lambda place: place.write("r.yaml", "- out\n")),
    Fault("a recipe in Latin-1", "run --config r.yaml", r"r\.yaml is not a YAML file: not UTF-8.*correct it",
          lambda place: place.write("r.yaml", "out: caf\xe9\n".encode("latin-1"))),
    Fault("a recipe in UTF-16", "run --config r.yaml", r"r\.yaml is not a YAML file: not UTF-8.*correct it",
          lambda place: place.write("r.yaml", "out: a\n".encode("utf-16"))),
    Fault("a key given twice", "plan --config r.yaml", r"r\.yaml.*'out' is given twice",
          lambda place: place.write("r.yaml", "out: a\nout: b\n")),
    Fault("a temperature that is no number", "generate --artifact {artifact} --prompt hi --temperature hot",
          r"temperature.*hot"),
    Fault("a base recipe that is a folder", "plan --config r.yaml", "there is no recipe 'base'; give the path",
          lambda place: (place.write("base/x", ""), place.write("r.yaml", "extends: base\n"))),
    Fault("a recipe that extends itself", "plan --config r.yaml", "in a circle: r.yaml -> r.yaml; remove one",
          lambda place: place.write("r.yaml", "extends: r.yaml\n")),
    Fault("a base recipe that cannot be read", "plan --config r.yaml", "cannot read the recipe .*: .*; check",
          lambda place: unreadable(place.write("base.yaml", "out: a\n"), place.write("r.yaml", "extends: base\n"))),
    Fault("a name of 300 characters", f"plan --config {'r' * 300}", r"File name too long: give a shorter name"),
]
BASE = {"out": "o", "family": "medusa", "target": "{name: tiny-random}"}
CONTENTS = [
    # What is no plain value.
    ("out: !!timestamp 2020-01-01", r"could not determine a constructor for the tag .*timestamp'.*correct it"),
    ("out: !!timestamp x", r"could not determine a constructor for the tag .*timestamp'.*correct it"),
    ("out: !!binary aGVsbG8=", r"could not determine a constructor .*binary'.*correct it"),
    ("out: !!set {a, b}", r"could not determine a constructor .*set'.*correct it"),
    ("out: !!omap [a: 1]", r"could not determine a constructor .*omap'.*correct it"),
    ("out: !!python/name:os.system x", r"could not determine a constructor .*correct it"),
    ("out: !!int x", r"r\.yaml is not a YAML file: .*correct it"),
    ("out: !!float x", r"r\.yaml is not a YAML file: .*correct it"),
    (f"tree: {{used_nodes: {'9' * 5000}}}", r"r\.yaml is not a YAML file: .*digits.*correct it"),
    (f"out: {'[' * 3000}", r"r\.yaml is not a YAML file: more than 50 levels .*; correct it"),
    # Values that hold themselves.
    ("out: &a [*a]", r"r\.yaml: .* levels, or a value that holds itself; write it flat"),
    ("target: &a {name: *a}", r"r\.yaml: .* levels, or a value that holds itself; write it flat"),
    ("prompts: &a {x: *a}", r"r\.yaml: .* levels, or a value that holds itself; write it flat"),
    ("train: &a {max_steps: *a}", r"r\.yaml: .* levels, or a value that holds itself; write it flat"),
    ("distill: &a {temperatures: [0, *a]}", r"r\.yaml: .* levels, or a value that holds itself; write it flat"),
    # Broken YAML.
    ("out: [", r"r\.yaml is not a YAML file: .*line \d+.*correct it"),
    ("out: 'a", r"r\.yaml is not a YAML file: .*line \d+.*correct it"),
    ("out: \x01", r"r\.yaml is not a YAML file: unacceptable character.*correct it"),
    ("<<: 3", r"r\.yaml is not a YAML file: expected a mapping .*line \d+.*correct it"),
    ("? [a, b]\n: c", r"r\.yaml is not a YAML file: .*unhashable key .*correct it"),
    ("out: *gone", r"r\.yaml is not a YAML file: found undefined alias 'gone' .*correct it"),
    ("%YAML 3.0\n---\nout: x", r"r\.yaml is not a YAML file: .*correct it"),
    ("---\nout: x\n---\nout: y", r"r\.yaml is not a YAML file: .*correct it"),
    # Text that no file name and no JSON file can hold.
    (r'out: "\ud800"', r"r\.yaml: out holds text that is not UTF-8.*write it in plain UTF-8"),
    (r'out: "a\0b"', r"r\.yaml: out holds text that is not UTF-8, or a null character.*write it in plain UTF-8"),
    (r'template: {system: "\udcff"}', r"template\.system holds text that is not UTF-8.*write it in plain UTF-8"),
    (r'target: {"name\ud800": 1}', r"a key of .*target holds text that is not UTF-8.*write it in plain UTF-8"),
    # Sections and keys of the wrong kind.
    *((f"{section}: {value}", rf"{section} is a section with the keys .*; write {section}: and the keys below it")
      for section in ("target", "template", "prompts", "distill", "batch", "tree", "evaluate", "train", "drafter")
      for value in ("null", "[a]", "3", "2020-01-01", "text")),
    ("out: null", "out must be a path, got null"),
    ("out: [a]", r'out must be a path, got \["a"\]'),
    ("out: {a: b}", r'out must be a path, got \{"a": "b"\}|unknown key out'),
    ("out: 16", "out must be a path, got 16"),
    ("data: 5", "data must be a path or null, got 5"),
    ("references: {a: b}", "references must be a path or null|unknown key"),
    ("family: null", "plan needs a family; set family in the recipe"),
    ("family: [a]", "unknown family .*choose one of medusa"),
    ("family: {a: b}", "unknown family .*choose one of medusa"),
    ("family: 3", "unknown family '3': choose one of medusa"),
    ("extends: null", "extends must be the name or path of one recipe, got None"),
    ("extends: [a]", "extends must be the name or path of one recipe"),
    ("extends: gone", "r.yaml extends 'gone', but there is no recipe 'gone'; give the path"),
    ("1: 2", "unknown key 1: choose one that plan has"),
    ("null: 3", "unknown key None: choose one that plan has"),
    # Numbers at the edges.
    *((f"{key.partition('.')[0]}: {{{key.partition('.')[2]}: {value}}}", rf"{key.rpartition('.')[2]}.*must .*{said}")
      for key in ("train.lr", "train.weight_decay", "evaluate.top_p", "distill.temperatures",
                  "prompts.own_temperature")
      for value, said in ((".nan", "nan"), ("1e400", ""), ("text", "text"), ("-1", "-1"))),
    *((f"{key.partition('.')[0]}: {{{key.partition('.')[2]}: {value}}}", rf"{key.rpartition('.')[2]}.*must.*")
      for key in ("train.max_steps", "train.accumulate", "train.devices", "distill.slots", "distill.max_new_tokens",
                  "batch.row_length", "tree.searched_nodes", "drafter.num_heads", "evaluate.max_new_tokens")
      for value in ("0", "-3", "1.5", "true", "null", "[]")
      if (key, value) != ("train.max_steps", "null")),
    ("tree: {searched_nodes: 99999999999999999999}", "searched_nodes must be at most .*; lower it"),
    *((f"{section}: {{{key}: {value}}}", f"{key} must .*at most .*, got")
      for section, key, value in (
          ("distill", "slots", "1000000000"), ("distill", "shard_prompts", "1000000000"),
          ("distill", "validation_prompts", "1000000000"),
          ("batch", "row_length", "1000000000"), ("batch", "rows_per_batch", "1000000000"),
          ("train", "max_steps", "99999999999999999999"), ("train", "accumulate", "99999999999999999999"),
          ("train", "lr", "1e+300"), ("evaluate", "max_new_tokens", "1000000000"),
          ("evaluate", "speed_prompts", "1000000000"))),
    ("drafter: {num_heads: 9999999999}", "num_heads must be at most 256, got 9999999999; lower it"),
    ("distill: {temperatures: [null]}", r"distill\.temperatures\[0\] must be 0 \(greedy\) or .*, got null"),
    ("distill: {temperatures: {a: b}}", r"distill\.temperatures must be one or more numbers"),
    ("distill: {temperatures: []}", "distill.temperatures must be one or more numbers"),
    ("train: {precision: x}", "train.precision must be one of auto, 32-true, bf16-mixed, got 'x'"),
    ("train: {accelerator: tpu}", "accelerator must be one of auto, cpu, gpu, cuda, mps, got 'tpu'"),
    ("train: {accelerator: ''}", "accelerator must be one of auto, cpu, gpu, cuda, mps, got ''"),
]


def unreadable(file: Path, *_others: object) -> None:
    """Take all rights of a file away, also from the superuser, for whom a link to itself is as unreadable."""
    if os.geteuid() != 0:
        file.chmod(0)
        return
    file.unlink()
    # A process's own memory map of address 0: open succeeds for everyone, reading it for no one.
    file.symlink_to("/proc/self/mem")


def recipe_fault(content: str, says: str) -> Fault:
    """A recipe for a Medusa drafter of the tiny target in which some lines are wrong."""
    given = {line.partition(":")[0] for line in content.splitlines()}
    lines = [f"{key}: {value}" for key, value in BASE.items() if key not in given]
    whole = content if content.startswith(("%", "---")) else "\n".join([*lines, content])
    return Fault(content if len(content) < 60 else f"{content[:57]}...", "plan --config r.yaml", says,
                 written("r.yaml", whole + "\n"))


FAULTS += [recipe_fault(content, says) for content, says in CONTENTS]
ROWS = [
    ("rows: null", "rows must be"), ("rows: []", "rows must be one or more"), ("rows: [null]", r"rows\[0\] must be"),
    ("rows: [medusa, medusa]", "rows must be one or more different"), ("rows: [gone]", "there is no recipe 'gone'; "),
    ("rows: {a: b}", "rows must be|unknown key"), ("rows: [2020-01-01]", "there is no recipe '2020-01-01'; give"),
    ("rows: [medusa]\nminutes: 0", "minutes must be above 0"), ("rows: [medusa]\nminutes: .nan", "minutes must be"),
    ("rows: [medusa]\nonly: hydra", "only names 'hydra'; choose one of medusa"),
    ("rows: [medusa]\ntarget: null", "target is a section with the keys"),
    ("rows: &a [*a]", "or a value that holds itself; write it flat"),
    ("rows: [families]", "names no family and cannot be a row; give"),
]
FAULTS += [Fault(f"families: {content}", "families --config f.yaml", says,
                 written("f.yaml", f"out: o\n{content}\n"))
           for content, says in ROWS]
FAULTS += [Fault(f"a row whose section train is {train}", "families --config f.yaml",
                 r"r\.yaml: train must be a section of keys and values, got .*; write it as",
                 lambda place, train=train: (  # type: ignore[misc]
                     place.write("f.yaml", "out: o\nrows: [./r.yaml]\n"),
                     place.write("r.yaml", f"family: medusa\ntrain: {train}\n")))
           for train in ("[1]", "text", "true")]


@pytest.mark.parametrize("fault", some_long(FAULTS, 3), ids=ids(FAULTS))
def test_a_wrong_recipe_is_refused_in_one_sentence(fault: Fault, place: Place) -> None:
    check(fault, place)


NAMED = ["", "-", "chain-", "chain-0", "chain--1", "chain-1.5", "chain-x", "chain-\u0663", "static-0", "static-",
         "eagle2-1", "eagle2-0", "dyspec-1", "sampled-", "stopping-0", "Static", "static ", "chain-3-3", "eagle-3",
         "tree", "None", "sampled-chain-", "sampled-chain-0", "static\n", "'static'", "static,chain", "eagle2-\u00b2"]
NO_POLICY = "there is no policy|ends in .*wants a whole number of at least"
LISTED = [("[]", "policies must hold at least one name"), ("[chain-0]", NO_POLICY), ("[null]", "there is no policy"),
          ("{a: b}", "there is no policy"), ("3", "there is no policy"), ("[[static]]", "there is no policy"),
          ("[static,nothing]", "there is no policy 'nothing'")]
POLICY_FAULTS = [
    *(Fault(f"generate with the policy {name!a}", "generate --artifact {artifact} --prompt hi", NO_POLICY,
            given=(f"--policy={name}",)) for name in NAMED),
    *(Fault(f"{words.split()[0]} with the policies {value}", words, says, given=(f"--evaluate.policies={value}",))
      for words in ("evaluate --out o --artifact {artifact}", "plan --config {tiny}") for value, says in LISTED),
]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("fault", POLICY_FAULTS, ids=ids(POLICY_FAULTS))
def test_a_wrong_policy_is_refused_before_the_target_is_loaded(fault: Fault, place: Place) -> None:
    check(fault, place)
