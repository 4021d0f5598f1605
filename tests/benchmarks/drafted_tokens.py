"""Drafted tokens at equal accepted length: acceptance heads (SpecDec++) against rules that need no training.

Drafts of full length are rolled out while the target answers the 80 hand-written prompts, with the exact acceptance of
each token. Heads are fitted to the first prompts; on the last ones every rule says where it would have stopped, which
gives its drafted tokens and its expected accepted length without decoding again (`modules/tuning/drafted_tokens.py`;
`draftsmith specdec` stores such figures with each head). The heads here have two weights of rejection.

    python tests/benchmarks/drafted_tokens.py --artifact runs/fastdraft/artifact
    python tests/benchmarks/drafted_tokens.py --layers 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,28,29
"""

import argparse
from pathlib import Path

from draftsmith.export import load_artifact
from draftsmith.modules import (
    AcceptanceHeadConfig,
    Drafter,
    DraftLM,
    DraftLMConfig,
    Rollouts,
    SamplingSetting,
    Target,
    TargetConfig,
    load_target,
    rollouts,
)
from draftsmith.modules.tuning.drafted_tokens import HEAD, Lengths, at_fixed_numbers, rules
from draftsmith.recipes.chat_settings import TemplateConfig, handwritten_prompts, prompt_sets
from draftsmith.trainers.acceptance_head import HeadFitConfig, fit_head, reliability


def drafter_of(options: argparse.Namespace, target: Target) -> Drafter:
    """The drafter of an artifact, or an untrained draft language model of some of the target's layers."""
    if options.artifact is not None:
        return load_artifact(options.artifact, target).drafter
    layers = tuple(int(number) for number in options.layers.split(","))
    return DraftLM.create(DraftLMConfig(layers=layers), target).eval()


def compare(target: Target, drafter: Drafter, prompts: list[list[int]], options: argparse.Namespace) -> None:
    """Print the tables of each temperature."""
    cut = len(prompts) * 3 // 4
    for temperature in (0.0, 1.0):
        settings = {"setting": SamplingSetting(temperature=temperature), "length": options.length,
                    "max_new_tokens": options.max_new_tokens, "batch_size": options.batch_size}
        learned, held_out = (rollouts(target, drafter, part, **settings) for part in (prompts[:cut], prompts[cut:]))
        print(f"\n## temperature {temperature:g}: {len(learned.chances_CT)} drafts to learn from, "
              f"{len(held_out.chances_CT)} to measure, {float(held_out.chances_CT.mean()):.0%} of tokens accepted\n")
        found: dict[str, Lengths] = {}
        for weight in (1.0, 6.0):
            config = HeadFitConfig(lr=1e-3, reject_weight=weight)
            fitted = fit_head(*(part.examples() for part in learned.split(0.15)), AcceptanceHeadConfig(), config)
            curves = {"as it is": reliability(fitted.head, held_out.examples()),
                      "without the weights": reliability(fitted.head, held_out.examples(), config)}
            for name, curve in curves.items():
                bins = ", ".join(f"{one.mean_confidence:.2f}: {one.acceptance_rate:.2f} ({one.guesses})"
                                 for one in curve.bins if one.guesses and one.mean_confidence is not None
                                 and one.acceptance_rate is not None)
                print(f"head, rejection x{weight:g}, {name}: calibration error {curve.expected_calibration_error:.3f}; "
                      f"estimated: exact (tokens) {bins}")
            estimates_CT = fitted.head.log_acceptance(held_out.states_CTD).exp()
            for name, lengths in rules(held_out, estimates_CT).items():
                found[name if name != HEAD else f"{name} x{weight:g}"] = lengths
        table(held_out, found)


def table(chains: Rollouts, found: dict[str, Lengths]) -> None:
    """Print the drafted tokens of each rule at the accepted lengths of fixed numbers of tokens."""
    rows = at_fixed_numbers(chains, found)
    names = list(rows[0].by_rule) if rows else []
    print(f"\n| accepted length | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for row in rows:
        cells = ["-" if drafted is None else f"{drafted:.2f}" for drafted in row.by_rule.values()]
        print(f"| {row.expected_accepted_length:.2f} | {' | '.join(cells)} |")


def main() -> None:
    """Measure on the embedded target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--artifact", type=Path, help="folder of an artifact whose drafter shows its states")
    parser.add_argument("--layers", default="0,1,2,3,27,28,29", help="without one: layers of the target as a draft")
    parser.add_argument("--target", default=TargetConfig().name, help="name of the target")
    parser.add_argument("--length", type=int, default=8, help="tokens of a draft")
    parser.add_argument("--max_new_tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--prompts", type=int, default=80, help="number of prompts")
    parser.add_argument("--batch_size", type=int, default=8, help="answers written at once")
    options = parser.parse_args()
    target = load_target(TargetConfig(name=options.target))
    questions = prompt_sets(TemplateConfig().build(target), {"handwritten": handwritten_prompts()})["handwritten"]
    # Every category is among the first prompts and the last ones.
    spread = [questions[place] for start in range(8) for place in range(start, len(questions), 8)]
    prompts = [list(question.prompt([])) for question in spread[: options.prompts]]
    compare(target, drafter_of(options, target), prompts, options)


if __name__ == "__main__":
    main()
