"""Wrong words on the command line."""

import sys

import pytest
from draftsmith.recipes.__main__ import main
from support.faults import Fault, Place, check, ids
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
           for device in ("cuda:99", "meta", "xpu", "mps", "toaster", "cpu:x")]
FAULTS += [
    Fault("no command of that name", "generat --prompt hi", "unknown command 'generat': did you mean generate"),
    Fault("a prompt is missing", GENERATE, "prompt.*see draftsmith generate --help"),
    Fault("a word of no option", f"{ASKED} more", "'more' belongs to no option; see draftsmith generate --help"),
    Fault("an option without a value", f"{GENERATE} --prompt", "prompt.*see draftsmith generate --help"),
    *(Fault(f"an empty value: {words} {given}", words, rf"error: {name} is empty; give it a value$", given=tuple(given))
      for words, name, *given in (
          ("generate --prompt hi", "artifact", "--artifact="), ("generate --prompt hi", "artifact", "--artifact", ""),
          (ASKED, "target.name", "--target.name="), (ASKED, "target.chat_template", "--target.chat-template", ""),
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
          "the format 'onnx' is none of dflash, eagle, eagle-sglang, gguf, huggingface, hydra, "
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
