"""Wrong prompt files."""

import gzip

import pytest
from support.faults import Fault, Place, check, ids
from support.tiers import some_long

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
FAULTS = [Fault(f"{command}: {name}", words, says, lambda place, content=content: place.write("p.jsonl", content))
          for command, words in WORDS.items() for name, content, says in CONTENTS]
FAULTS += [
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
@pytest.mark.parametrize("fault", some_long(FAULTS, 3), ids=ids(FAULTS))
def test_a_wrong_prompt_file_is_refused_before_the_target_is_loaded(fault: Fault, place: Place) -> None:
    check(fault, place)


def test_a_category_that_is_broken_tex_is_plain_text_in_the_report(place: Place) -> None:
    from draftsmith.export.report.plots import accepted_lengths

    assert "\\frac{$" in accepted_lengths({"a": {"\\frac{$": 1.5, "$x$": 1.2, "$": 1.1}}, 1.3)
