"""Rounding of a target by number format: by how much its likely logits move against each other, the bound of near-ties.

    python tests/benchmarks/rounding.py [--target NAME] [--prompts N] [--tokens N] [--formats float32,bfloat16]

Hand-written prompts are answered by transformers' `generate`, and each text is read twice: in one pass, and in the
steps of `generate`. Between the two, differences of likely logits change by what a report calls rounding.
"""

import argparse
from statistics import median

from draftsmith.export.evaluation.lossless import NativeReading, generate, native_model
from draftsmith.modules import DEFAULT_NAME, TargetConfig, load_target
from draftsmith.recipes.chat_settings import TemplateConfig, handwritten_prompts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--prompts", type=int, default=20, help="hand-written prompts, spread over the categories")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--formats", default="float32,bfloat16", help="number formats")
    options = parser.parse_args()
    questions = handwritten_prompts()
    print("format    answers  tokens  median rounding  largest rounding (nats)")
    for name in options.formats.split(","):
        target = load_target(TargetConfig(name=options.target, dtype=name))
        template, found, tokens = TemplateConfig().build(target), list[float](), 0
        for one in questions[:: max(1, len(questions) // options.prompts)][: options.prompts]:
            prompt = template.prompt(one.history())
            with native_model(target) as model:
                answer, = generate(model, target, [prompt], max_new_tokens=options.tokens)
            found.append(NativeReading(target, prompt, answer).slack)
            tokens += len(answer)
        print(f"{name:9} {len(found):7} {tokens:7} {median(found):16.2g} {max(found):17.2g}", flush=True)


if __name__ == "__main__":
    main()
