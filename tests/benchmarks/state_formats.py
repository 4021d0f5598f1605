"""Error of stored states in eight bits: with scales for tokens, for channels, and for both, by kind of state.

    python tests/benchmarks/state_formats.py [--target NAME] [--taps N ...] [--rows N] [--row-length N]

The target reads the recipes' hand-written prompts, one after another. For each kind of state and each way to store it,
the table has the error of the median and of the worst channel and token, each relative to its own norm, and for final
states the KL divergence of the target's distribution, in nats. `energy` is the share of the squared norm in the eight
largest channels.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from draftsmith.data.store.state_formats import CHANNELS, FORMATS, STATES, TOKENS, StateFormat, unpacked
from draftsmith.modules import Features, Target, TargetConfig, load_target
from torch import Tensor
from torch.nn import functional

PROMPTS = Path(__file__).resolve().parents[2] / "recipes" / "handwritten.jsonl"
LARGEST_CHANNELS = 8


def by_token(states_TD: Tensor, form: StateFormat) -> Tensor:
    """States stored with one scale for each token."""
    return _restored(states_TD, states_TD.abs().amax(1, keepdim=True) / form.largest, form)


def by_channel(states_TD: Tensor, form: StateFormat) -> Tensor:
    """States stored with one scale for each channel."""
    return _restored(states_TD, states_TD.abs().amax(0) / form.largest, form)


def by_both(states_TD: Tensor, form: StateFormat) -> Tensor:
    """States stored as the package stores int8."""
    held = replace(form, by_channel=True).packed(states_TD)
    return unpacked(held[STATES], held[CHANNELS], held[TOKENS])


def plain(states_TD: Tensor, form: StateFormat) -> Tensor:
    """States without scales."""
    return (states_TD.clamp(-form.largest, form.largest) if form.scaled else states_TD).to(form.dtype).float()


def _restored(states_TD: Tensor, scales: Tensor, form: StateFormat) -> Tensor:
    codes_TD = states_TD / scales.clamp(min=1e-30)
    codes_TD = codes_TD if form.dtype.is_floating_point else codes_TD.round()
    return codes_TD.to(form.dtype).float() * scales


WAYS: tuple[tuple[str, str, Callable[[Tensor, StateFormat], Tensor]], ...] = (
    ("bfloat16", "none", plain), ("float16", "none", plain), ("fp8", "none", plain),
    *((name, scales, stored) for name in ("int8", "fp8")
      for scales, stored in (("token", by_token), ("channel", by_channel), ("both", by_both))),
)
"""Format, scales, and what a state becomes."""


def errors(found_TD: Tensor, states_TD: Tensor) -> tuple[float, ...]:
    """Errors relative to norms: of the median and the worst channel, of the median and the worst token."""
    apart_TD = found_TD - states_TD
    both = [apart_TD.norm(dim=dim) / states_TD.norm(dim=dim).clamp(min=1e-30) for dim in (0, 1)]
    return tuple(float(one) for relative in both for one in (relative.median(), relative.max()))


def energy(states_TD: Tensor) -> float:
    """Share of the squared norm in the largest channels."""
    squares_D = states_TD.square().sum(0)
    return float(squares_D.topk(min(LARGEST_CHANNELS, len(squares_D))).values.sum() / squares_D.sum())


@torch.no_grad()
def divergence(target: Target, found_TD: Tensor, states_TD: Tensor) -> float:
    """Mean KL divergence of the distribution of found states from that of the exact ones, in nats."""
    total = 0.0
    for found_ND, exact_ND in zip(found_TD.split(64), states_TD.split(64), strict=True):
        p_NV, q_NV = (target.logits(one.to(target.dtype)).float().log_softmax(-1) for one in (exact_ND, found_ND))
        total += float(functional.kl_div(q_NV, p_NV, reduction="sum", log_target=True))
    return total / len(states_TD)


def lines(target: Target, kinds: dict[str, Tensor]) -> list[str]:
    """The table."""
    found = ["| states | energy, % | format | scales | median channel, % | worst channel, % | median token, % | "
             "worst token, % | KL, nats |", "|---|--:|---|---|--:|--:|--:|--:|--:|"]
    for kind, states_TD in kinds.items():
        for name, scales, stored in WAYS:
            restored_TD = stored(states_TD, FORMATS[name])
            shown = " | ".join(f"{100 * one:.2f}" for one in errors(restored_TD, states_TD))
            apart = f"{divergence(target, restored_TD, states_TD):.2e}" if kind == "final" else ""
            found.append(f"| {kind} | {100 * energy(states_TD):.0f} | {name} | {scales} | {shown} | {apart} |")
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=TargetConfig().name, help="model by name or folder")
    parser.add_argument("--taps", type=int, nargs="+", default=[2, 14, 26], help="tapped layers")
    parser.add_argument("--rows", type=int, default=8, help="rows of text")
    parser.add_argument("--row-length", type=int, default=128, help="tokens of a row")
    options = parser.parse_args(words)
    target = load_target(TargetConfig(name=options.target, device="cpu"))
    text = " ".join(" ".join(json.loads(line)["turns"]) for line in PROMPTS.read_text(encoding="utf-8").splitlines())
    tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = [tokens[at : at + options.row_length] for at in range(0, len(tokens), options.row_length)][: options.rows]
    read = [target.encode(Features.from_rows([(row, [True] * len(row))]), tuple(options.taps)) for row in rows]
    kinds = {"final": torch.cat([one.final()[0] for one in read]).float()}
    kinds |= {f"layer {tap}": torch.cat([one.taps[tap][0] for one in read]).float() for tap in options.taps}
    print(f"{target.identity.name}, {sum(map(len, rows))} tokens, torch {torch.__version__}\n")
    print("\n".join(lines(target, kinds)))


if __name__ == "__main__":
    main()
