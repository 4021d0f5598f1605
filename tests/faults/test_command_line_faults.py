"""Wrong words on the command line, wrong prompt files, and folders that an export must not replace."""

import gzip
import sys
from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import main
from support.faults import Fault, Place, check, ids, written
from support.tiers import some_long

LONG = "n" * 300
GENERATE, EVALUATE = "generate --artifact {artifact}", "evaluate --out o --artifact {artifact}"
ASKED = f"{GENERATE} --prompt hi"
NUMBERS = [
    *((ASKED, "temperature", value) for value in ("-1", "-0.0001", "0.0001", "1000.1", "nan", "inf", "-inf", "1e999",
                                                  "hot", "[0]", "0,5", "null", "true")),
    *((ASKED, "max_new_tokens", value) for value in ("0", "-1", "1.5", "1e3", "null", "many", "inf")),
    *((ASKED, "top_k", value) for value in ("-1", "1.5", "nan", "null")),
    *((ASKED, "top_p", value) for value in ("0", "-0.1", "1.0001", "nan", "inf", "null")),
    *((ASKED, "min_p", value) for value in ("-0.1", "1.1", "nan", "inf")),
    *((ASKED, "repetition_penalty", value) for value in ("0", "-1", "nan", "inf", "null")),
    *((ASKED, "seed", value) for value in ("1.5", "nan", "null")),
    *((EVALUATE, "temperatures", value) for value in ("-1", "[0,nan]", "inf", "[]", "1001", "[0,[1]]")),
    *((EVALUATE, "batch_sizes", value) for value in ("0", "-1", "[]", "[0]", "1.5", "null")),
    *((EVALUATE, "max_new_tokens", value) for value in ("1", "0", "-5", "nan")),
    *((EVALUATE, "limit", value) for value in ("0", "-1", "x")),
    *((EVALUATE, "speed_prompts", value) for value in ("-1", "x", "null")),
]
FAULTS = [Fault(f"{words.split()[0]} --{name} {value}", f"{words} --{name}={value.replace(' ', '')}",
                rf"(a |){name.removesuffix('s')}\w* must .*") for words, name, value in NUMBERS]
FAULTS += [Fault(f"{words.split()[0]} {name} with bytes of no UTF-8", words,
                 "the command line.* holds text that is not UTF-8", given=(name, "caf\udce9"))
           for words, name in ((GENERATE, "--prompt"), (f"{GENERATE} --prompt hi", "--stop"), (ASKED, "--target.name"),
                               ("generate --prompt hi", "--artifact"), ("run --config {tiny}", "--out"),
                               ("evaluate --out o", "--artifact"), (EVALUATE, "--prompts"), ("plan", "--config"),
                               ("export --artifact {artifact} --format medusa", "--out"))]
FAULTS += [Fault(f"{words.split()[0]} {name} of 300 characters", f"{words} {name} {LONG}",
                 "(File name too long: give a shorter name|holds no artifact|could not be read|could not be loaded|"
                 "cannot read|cannot write|does not exist)")
           for words, name in (("generate --prompt hi", "--artifact"), (ASKED, "--template.tools"),
                               (ASKED, "--target.name"), (ASKED, "--target.chat_template"), (EVALUATE, "--prompts"),
                               (EVALUATE, "--references"), ("evaluate --artifact {artifact}", "--out"),
                               ("export --artifact {artifact} --format medusa", "--out"),
                               ("run --config {tiny}", "--out"), ("train --config {tiny} --out o", "--data"))]
FAULTS += [Fault(f"{words.split()[0]} on the device {device}", f"{words} --target.device {device}",
                 rf"device '{device}'.*use|'{device}' is not a device; use")
           for words in (ASKED, EVALUATE, "plan --config {tiny}", "run --config {tiny} --out o")
           for device in ("cuda:99", "meta", "xpu", "mps", "toaster", "cpu:x")
           # It needs no device to plan for one.
           if not (words.startswith("plan") and device == "cuda:99")]
FAULTS += [
    Fault("no command of that name", "generat --prompt hi", "unknown command 'generat': did you mean generate"),
    Fault("a prompt is missing", GENERATE, "prompt.*see draftsmith generate --help"),
    Fault("a word of no option", f"{ASKED} more", "'more' belongs to no option; see draftsmith generate --help"),
    Fault("an option without a value", f"{GENERATE} --prompt", "prompt.*see draftsmith generate --help"),
    *(Fault(f"an empty value: {words} {given}", words, rf"error: {name} is empty; give it a value$", given=tuple(given))
      for words, name, *given in (
          ("generate --prompt hi", "artifact", "--artifact="), ("generate --prompt hi", "artifact", "--artifact", ""),
          (ASKED, "target.name", "--target.name="), (ASKED, "target.adapter", "--target.adapter", ""),
          (ASKED, "target.chat_template", "--target.chat-template", ""),
          (ASKED, "template.tools", "--template.tools="), ("evaluate --out o", "prompts", "--prompts="),
          ("export --artifact a --format medusa", "out", "--out="), ("run --config {tiny}", "out", "--out", ""),
          ("run --config {tiny}", "prompts.path", "--prompts.origin=file", "--prompts.path="),
          ("run --config {tiny}", "prompts.path", "--prompts.origin", "dataset", "--prompts.path", ""),
          ("push --licence mit --folder o", "repository", "--repository="),
          ("plan", "data", "--family=eagle", "--data="))),
    *(Fault(f"no recipe: {words}", words, "--config names no recipe; give the path .* --config quickstart")
      for words in ("run --config", "plan --config=", "run --config --out o", "evaluate --out o --config")),
    *(Fault(f"{words.split()[0]} {name} {value}", f"{words} --{name} {value}",
            rf"{name} must be different from each other, got .*; leave out those that stand there twice")
      for words, name, value in ((EVALUATE, "temperatures", "[0,0]"), (EVALUATE, "temperatures", "[0,1,0.0]"),
                                 (EVALUATE, "batch_sizes", "[1,4,1]"), (EVALUATE, "policies", "[static,static]"),
                                 (EVALUATE, "baselines", "[ngrams,ngrams]"),
                                 ("specdec --artifact {artifact}", "labels.temperatures", "[1,1]"))),
    *(Fault(f"a degree with the placement {placement}", f"{ASKED} --target.degree 2 --target.placement {placement}",
            f"target.degree 2 is for processes that share one target, and with target.placement {placement} none do; "
            "leave it out, or set target.placement: fully_sharded") for placement in ("replicated", "layers")),
    Fault("an artifact that is a file", "generate --prompt hi --artifact a", "a holds no artifact .*give the folder",
          lambda place: place.write("a", "")),
    Fault("an artifact that is a link to itself", "generate --prompt hi --artifact a", "holds no artifact|remove",
          lambda place: (place.folder / "a").symlink_to("a")),
    Fault("an unknown format names merged too", "export --artifact gone --out o --format onnx",
          "the format 'onnx' is none of dflash, eagle, eagle-sglang, eagle4, gguf, huggingface, hydra, "
          "kangaroo, medusa, medusa-vllm, merged"),
    Fault("an empty format", "export --artifact {artifact} --out o --format=", "the format '' is none of dflash"),
    Fault("merged without an adapter", "export --artifact {artifact} --out o --format merged",
          "merged holds the target of an artifact that changes it, and this one does not; choose --format medusa"),
    Fault("the folder one is in", "export --artifact {artifact} --out . --format medusa",
          "the folder you are in|holds other files|cannot write"),
    Fault("the root folder", "export --artifact {artifact} --out / --format medusa", "choose|name"),
    Fault("a stop text that is empty", ASKED, "stop must not hold an empty text", given=("--stop", "['']")),
    Fault("a tools file that is missing", f"{ASKED} --template.tools gone.json", r"cannot read gone\.json: .*give"),
    Fault("a tools file that is no JSON", f"{ASKED} --template.tools t", r"t cannot be read as JSON .*; give",
          lambda place: place.write("t", '["')),
    Fault("a tools file of numbers", f"{ASKED} --template.tools t", "must hold a JSON list of objects",
          lambda place: place.write("t", "[1]")),
    Fault("evaluate without anything", "evaluate --out o", "evaluate needs an artifact, or a target"),
    Fault("an out that is a file", "evaluate --artifact {artifact} --out o", "o is a file, a folder was expected",
          lambda place: place.write("o", "mine")),
    Fault("references that are none", f"{EVALUATE} --references r", "references names r, which holds no references; ch",
          lambda place: place.write("r", "{}"), leaves=("o/*",)),
    Fault("references without lists", f"{EVALUATE} --references r", "references names r, which holds no references; ch",
          lambda place: place.write("r", '{"format": "draftsmith references", "answers": {"a": 3}}'), leaves=("o/*",)),
    Fault("a baseline that does not exist", f"{EVALUATE} --baselines [x]", "there is no baseline 'x'; choose from"),
    Fault("data that are no folder", "train --config {tiny} --out o --data gone", "data names gone, .*; give the data"),
    Fault("training before distillation", "train --config {tiny} --out o", "holds no complete data; run"),
]


@pytest.mark.parametrize("fault", some_long(FAULTS, 3), ids=ids(FAULTS))
def test_wrong_words_are_refused_in_one_sentence(fault: Fault, place: Place) -> None:
    check(fault, place)


def test_a_closed_output_costs_no_traceback(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "--artifact", str(place.artifact), "--prompt", "hi", "--max_new_tokens", "4"]) == 0


# Exports -------------------------------------------------------------------------------------------------------------

EXPORT = "export --artifact {artifact} --format medusa --out {here}/model"


def model_folder(place: Place) -> Path:
    """Somebody's model, whose files have the names that an export has too."""
    for name in ("config.json", "medusa_lm_head.safetensors", "README.md"):
        place.write(f"model/{name}", "years of work")
    return place.folder / "model"


def link(place: Place) -> None:
    """A link to an empty folder elsewhere."""
    (place.folder / "elsewhere").mkdir()
    (place.folder / "model").symlink_to("elsewhere")


def changed_export(place: Place) -> None:
    """An earlier export, whose README somebody has written on since."""
    out = place.folder / "model"
    assert main(["export", "--artifact", str(place.artifact), "--format", "medusa", "--out", str(out)]) == 0
    with (out / "README.md").open("a") as file:
        file.write("my own notes\n")


EXPORT_FAULTS = [
    Fault("a model folder with our file names", EXPORT,
          r"model holds other files \(README.md, config.json, medusa_lm_head.safetensors\) than an unchanged export",
          model_folder),
    Fault("an export that was changed since", EXPORT, r"holds other files \(README.md\) than an unchanged export",
          changed_export),
    Fault("a copy of the marker over other files", EXPORT, r"holds other files \(README.md, config.json, medusa_lm",
          lambda place: (changed_export(place), model_folder(place))),
    Fault("the artifact itself", "export --artifact {artifact} --format medusa --out {artifact}",
          r"artifact holds other files \(.*, \.\.\.\) than an unchanged export .*choose another folder"),
    Fault("a link to a folder", EXPORT, r"model is a link to elsewhere and would be replaced.*give the path of", link),
    Fault("a link to nothing", EXPORT, r"model is a link to gone and would be replaced",
          lambda place: (place.folder / "model").symlink_to("gone")),
    Fault("a file", EXPORT, r"model is a file, a folder was expected", lambda place: place.write("model", "text")),
]


@pytest.mark.parametrize("fault", EXPORT_FAULTS, ids=ids(EXPORT_FAULTS))
def test_an_export_replaces_nothing_but_its_own(fault: Fault, place: Place) -> None:
    check(fault, place)


def test_an_earlier_export_is_replaced_with_what_a_killed_one_left(place: Place) -> None:
    out = place.folder / "model"
    words = ["export", "--artifact", str(place.artifact), "--format", "medusa", "--out", str(out)]
    assert main(words) == 0
    before = place.fingerprints()
    place.write("model/.README.md.partial", "half")
    place.write(".model.partial/config.json", "half")
    assert main(words) == 0
    assert place.fingerprints() == before


# Prompt files --------------------------------------------------------------------------------------------------------

WORDS = {
    "evaluate": "evaluate --out o --artifact {artifact} --prompts p.jsonl",
    "run": "run --config {tiny} --out o --prompts.origin file --prompts.path p.jsonl",
}
"""Commands that read a prompt file."""
GOOD = '{"prompt": "hi"}\n'
CONTENTS: list[tuple[str, str | bytes, str]] = [
    ("an empty file", "", "holds no prompt; write one JSON object a line"),
    ("blank lines", "\n\n", "holds no prompt; write one"),
    ("Latin-1", '{"prompt": "caf\xe9"}'.encode("latin-1"), "is not UTF-8 text .* at byte 15.*; save it as UTF-8"),
    ("UTF-16", GOOD.encode("utf-16"), r"p\.jsonl is neither JSON Lines nor a JSON array in UTF-8, .*; write"),
    ("CSV", "prompt,answer\na,b\n", "CSV and plain text are not read; write each row as a JSON object"),
    ("a text that does not end", '{"prompt": "hi', r"p\.jsonl:1: not JSON \(Unterminated string starting at column 12"),
    ("an object that does not end", '{"prompt": "hi"', r"p\.jsonl:1: not JSON \(.* at column \d+\); write one object"),
    ("two objects in a line", '{"prompt": "a"} {"prompt": "b"}', r"not JSON \(Extra data at column 17\); write one"),
    ("brackets without end", "[" * 50_000,
     r"p\.jsonl is damaged \(its list has no end\); write it anew"),
    ("a number of 5000 digits", '{"prompt": ' + "1" * 5000 + "}", r"p\.jsonl:1: not JSON \(.*digits.*; write one"),
    ("a list", "[1]", r"p\.jsonl:1 \(row 1\): expected a JSON object, got 1; write one object a line"),
    ("null", "[null]", r"p\.jsonl:1 .*: expected a JSON object, got null; write one"),
    ("an archive that is cut off", gzip.compress(GOOD.encode(), mtime=0)[:20],
     r"p\.jsonl is damaged \(.*\); write it anew"),
    ("half a surrogate pair", '{"prompt": "a\\ud800b"}', r"p\.jsonl:1: .* holds half of a surrogate pair.*write"),
    ("half a pair in a name", '{"prompt": "a", "question_id": "\\udcff"}', "holds half of a surrogate"),
    ("no known key", '{"words": "hi"}', r"the row has none of the keys messages, .*rename one, or set prompts\.column"),
    ("a prompt of null", '{"prompt": null}', r"p\.jsonl:1: the row has none of the keys messages, .* rename one"),
    ("a prompt of a number", '{"prompt": 3}', "prompt must be text or a list of messages, got 3; give each message"),
    ("a prompt of spaces", '{"prompt": "  "}', "prompt is empty; write its text, or leave the row out"),
    ("a system of a number", '{"prompt": "a", "system": 1}', "system must be text, got 1; write it as text"),
    ("turns of numbers", '{"turns": [1]}', "a message must be an object, got 1; give its role"),
    ("a message of text", '{"messages": ["hi"]}', "messages must be a list of messages, .*give each message"),
    ("a message without role", '{"messages": [{"content": "hi"}]}', "the role of a message must be one of"),
    ("a message of another role", '{"messages": [{"role": "cat", "content": "hi"}]}', "must be one of .*got 'cat'"),
    ("a message without text", '{"messages": [{"role": "user"}]}', "a message of the user is empty; write its text"),
    ("a picture", '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "of the kind image; leave"),
    ("an assistant alone", '{"messages": [{"role": "assistant", "content": "a"}]}', "no user message"),
    ("the second line is wrong", f"{GOOD}3\n", r"p\.jsonl:2: expected a JSON object"),
]
PROMPT_FAULTS = [
    *(Fault(f"{command}: {name}", words, says, written("p.jsonl", content))
      for command, words in WORDS.items() for name, content, says in CONTENTS),
    *(Fault(f"{command}: a file that is missing", words, r"cannot read the prompts p\.jsonl: .*; check the path")
      for command, words in WORDS.items()),
    *(Fault(f"{command}: a folder in place of a file", words, says, lambda place: (place.folder / "p.jsonl").mkdir())
      for (command, words), says in zip(WORDS.items(), (
          r"cannot read the prompts p\.jsonl: .*; check the path",
          r"prompts\.path p\.jsonl is a folder; name a file .* --prompts\.origin dataset"), strict=True)),
    Fault("evaluate: plain documents", WORDS["evaluate"], r"p\.jsonl holds plain documents \(p\.jsonl:2\), .*; give pr",
          lambda place: place.write("p.jsonl", GOOD + '{"text": "a document"}\n')),
    Fault("run: as many prompts as are held out",
          WORDS["run"] + " --distill.validation_prompts 60 --distill.test_prompts 4",
          r"p\.jsonl gives 64 prompts, and 64 are to be held out .*leaves none to train on; give more",
          lambda place: place.write("p.jsonl", GOOD * 64)),
    Fault("run: fewer prompts by a limit", WORDS["run"] + " --prompts.limit 28", "gives 28 prompts, and 28 are to",
          lambda place: place.write("p.jsonl", GOOD * 64)),
]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("fault", some_long(PROMPT_FAULTS, 3), ids=ids(PROMPT_FAULTS))
def test_a_wrong_prompt_file_is_refused_before_the_target_is_loaded(fault: Fault, place: Place) -> None:
    check(fault, place)


def test_a_category_that_is_broken_tex_is_plain_text_in_the_report(place: Place) -> None:
    from draftsmith.export.report.plots import accepted_lengths

    assert "\\frac{$" in accepted_lengths({"a": {"\\frac{$": 1.5, "$x$": 1.2, "$": 1.1}}, 1.3)
