"""Accepted length of drafts by length of context, and what their caches hold: for drafts with windows and without.

    python tests/benchmarks/context_windows.py ARTIFACT... [--lengths 1024,4096] [--questions N] [--tokens N]

The context of a question is a conversation: other hand-written prompts with the target's own answers, as many as fit.
Lengths beyond the target's context are left out. Every draft grows its own static tree, greedily.
"""

import argparse
from pathlib import Path

from draftsmith.data.prompts.chat import ChatTemplate
from draftsmith.export import load_artifact
from draftsmith.modules import DEFAULT_NAME, DecodeSettings, Request, TargetConfig, decode, load_target
from draftsmith.recipes.chat_settings import TemplateConfig, handwritten_prompts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifacts", type=Path, nargs="+", help="drafts of one target, such as with other windows")
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--lengths", default="1024,4096,16384,32768", help="tokens of context")
    parser.add_argument("--questions", type=int, default=8, help="questions of each length")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    options = parser.parse_args()
    target, questions = load_target(TargetConfig(name=options.target)), [
        str(one.messages[0]["content"]) for one in handwritten_prompts()]
    template, settings = TemplateConfig().build(target), DecodeSettings(batch_size=16)
    drafts = [load_artifact(folder, target) for folder in options.artifacts]
    asked = [Request(tokens=tuple(template.prompt([{"role": "user", "content": question}])), index=index,
                     max_new_tokens=128) for index, question in enumerate(questions)]
    answers = [target.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in decode(
        target, asked, settings, drafter=drafts[0].drafter, policy=drafts[0].policy()).generations]
    print("context  accepted length and slots of a row's cache: " + ", ".join(map(str, options.artifacts)))
    for length in map(int, options.lengths.split(",")):
        if length + options.tokens > target.context_length:
            print(f"{length:7}  beyond the {target.context_length:,} tokens of {target.identity.name}")
            continue
        requests = [Request(tokens=conversation(template, questions, answers, number, length), index=number,
                            max_new_tokens=options.tokens) for number in range(options.questions)]
        cells = []
        for one in drafts:
            found = decode(target, requests, DecodeSettings(ignore_eos=True), drafter=one.drafter, policy=one.policy())
            caches = one.drafter.start(1, length + options.tokens).caches
            for cache in caches:
                cache.reserve(length, settings.prefill_chunk)
            cells.append(f"{found.accepted_length:.3f} {max((cache.capacity for cache in caches), default=0):7,}")
        print(f"{length:7}  " + "  ".join(cells), flush=True)


def conversation(template: ChatTemplate, questions: list[str], answers: list[str], last: int, length: int
                 ) -> tuple[int, ...]:
    """A question after as many others with their answers as `length` tokens hold."""
    messages = [{"role": "user", "content": questions[last]}]
    for turn in range(1, 1000):
        other = (last + turn) % len(questions)
        longer = [{"role": "user", "content": questions[other]}, {"role": "assistant", "content": answers[other]},
                  *messages]
        if len(template.prompt(longer)) > length:
            break
        messages = longer
    return tuple(template.prompt(messages))


if __name__ == "__main__":
    main()
