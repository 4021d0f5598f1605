"""Prompts with a reference text each, of which the answer is an edited copy: the edit set of the figures. Prints tokens
of a pass, counted along the answers.

    python tests/benchmarks/edit_prompts.py --out FILE [--target NAME] [--rows N] [--tokens N] [--every N] [--seed N]

The category says where the edits are. *planted*: the target answers a hand-written prompt, and the reference is this
answer with edits in it, so that the target will write the reference without them. *asked*: the prompt holds the edited
text, too, and asks for its correction; nobody knows beforehand what the target answers, and the table counts as if it
were the answer without the edits. An edit replaces, adds or leaves out one to three words.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from draftsmith.data import ChatTemplate
from draftsmith.export.evaluation.schedule import spread
from draftsmith.modules import (
    DEFAULT_NAME,
    DecodeSettings,
    Request,
    Target,
    TargetConfig,
    baseline,
    decode,
    load_target,
)
from draftsmith.recipes.chat_settings import handwritten_prompts
from support.answers import observe

MOST_WORDS = 3  # Of an edit
CORRECT = "Correct the mistakes in this text. Answer with the corrected text alone.\n\n{}"
ROWS = 8  # Answers that are written at once
BASELINES = ("reference", "prompt_lookup")


def edited(text: str, others: Sequence[str], every: int, chance: random.Random) -> str:
    """A text with an edit in about every `every` words, at least one; new words are of `others`."""
    words = text.split(" ")
    places = sorted(chance.sample(range(len(words)), max(1, len(words) // every)), reverse=True)
    # From the end, so that an edit moves no later place.
    for place in places:
        kind, count = chance.choice(("replace", "add", "leave out")), chance.randint(1, MOST_WORDS)
        new = [] if kind == "leave out" else chance.choices(others, k=count)
        words[place : place + (0 if kind == "add" else count)] = new
    return " ".join(words)


def answered(target: Target, template: ChatTemplate, count: int, tokens: int) -> list[tuple[str, list[int]]]:
    """`count` hand-written prompts with the target's answers."""
    prompts = [prompt.question for prompt in spread(handwritten_prompts(), count)]
    asked = [template.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    made = decode(target, [Request(tuple(one), place, tokens) for place, one in enumerate(asked)],
                  DecodeSettings(batch_size=ROWS)).generations
    return [(prompt, one.tokens) for prompt, one in zip(prompts, made, strict=True)]


def rows(answers: Sequence[tuple[str, str]], every: int, seed: int = 0) -> list[dict[str, str]]:
    """Two rows for each prompt with its answer."""
    chance, found = random.Random(seed), []
    words = {word for _, answer in answers for word in answer.split()}
    others = sorted(filter(str.isalpha, words)) or sorted(words) or ["edit"]
    for prompt, answer in answers:
        reference = edited(answer, others, every, chance)
        found += [{"prompt": prompt, "reference": reference, "category": "planted"},
                  {"prompt": CORRECT.format(reference), "reference": reference, "category": "asked"}]
    return found


def passes(target: Target, name: str, prompt: Sequence[int], reference: Sequence[int], answer: Sequence[int]) -> int:
    """Passes after the prompt's in which an answer is decoded with a baseline."""
    drafter, policy = baseline(name, target)
    state = drafter.start(1, len(prompt) + len(reference) + len(answer) + policy.max_size)
    drafter.open(state, torch.tensor([0]), reference=reference, own_text=())
    observe(drafter, state, [0], [[*prompt, answer[0]]])
    place = count = 0
    while place < len(answer) - 1:
        drafted = policy.grow(drafter, state, torch.tensor([answer[place]])).tokens_BN[0, 1:].tolist()
        right = 0
        while right < min(len(drafted), len(answer) - place - 2) and drafted[right] == answer[place + 1 + right]:
            right += 1
        observe(drafter, state, [0], [list(answer[place : place + right + 2])])
        place, count = place + right + 1, count + 1
    return count


def table(target: Target, template: ChatTemplate, found: Sequence[dict[str, str]], answers: Sequence[Sequence[int]]
          ) -> Iterator[str]:
    """Tokens of a pass by category and baseline, in Markdown."""
    yield "| edits | " + " | ".join(BASELINES) + " |"
    yield "|---|" + "--:|" * len(BASELINES)
    for category in ("planted", "asked"):
        here = [one for one in found if one["category"] == category]
        lengths = []
        for name in BASELINES:
            count = sum(passes(target, name, template.prompt([{"role": "user", "content": one["prompt"]}]),
                               target.tokenizer.encode(one["reference"], add_special_tokens=False), answer)
                        for one, answer in zip(here, answers, strict=True))
            lengths.append(sum(len(answer) - 1 for answer in answers) / max(1, count))
        yield f"| {category} | " + " | ".join(f"{one:.2f}" for one in lengths) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file")
    parser.add_argument("--target", default=DEFAULT_NAME)
    parser.add_argument("--rows", type=int, default=24, help="answers of the target, each with two rows")
    parser.add_argument("--tokens", type=int, default=192, help="longest answer")
    parser.add_argument("--every", type=int, default=25, help="words for each edit")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    target = load_target(TargetConfig(name=given.target))
    template = ChatTemplate(target.tokenizer, ends=target.eos_ids)
    answers = answered(target, template, given.rows, given.tokens)
    found = rows([(prompt, target.tokenizer.decode(tokens, skip_special_tokens=True)) for prompt, tokens in answers],
                 given.every, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in found))
    print(*table(target, template, found, [tokens for _, tokens in answers]), sep="\n")


if __name__ == "__main__":
    main()
