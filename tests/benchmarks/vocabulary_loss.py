"""Time and peak memory of the vocabulary loss and its gradient, in chunks and plain.

    python tests/benchmarks/vocabulary_loss.py [--tokens 512] [--vocabulary 32768 131072] [--variants ...] [--chunk N]

Every variant runs in a process of its own, since a peak of resident memory never falls. The peak is counted from just
before the first step; batch, states and their gradient are part of it. "plain" projects all tokens at once and keeps
the logits for backward, as a training script without chunks does; it computes no metrics, "chunked" does. "copy" trains
an output layer of its own for every head, whose gradients both must hold. Seconds are CPU seconds of one thread, which
contention distorts least: one warm-up step on few tokens, then the fastest of three.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

HEADS = 4
VARIANTS = ("hard plain", "hard chunked", "soft plain", "soft chunked", "copy plain", "copy chunked")


def measure(variant: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and MiB of one variant, in this process."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, way = variant.split()
    tokens, width, (vocabulary,) = options.tokens, options.width, options.vocabulary
    weight = torch.randn(vocabulary, width) * width**-0.5
    owned = [torch.nn.Parameter(weight.clone()) for _ in range(HEADS if kind == "copy" else 0)]

    def project(hidden, step):
        return functional.linear(hidden, owned[step] if owned else weight)

    def chunked(states, final, features):
        from draftsmith.modules.interfaces.drafter import Drafts
        from draftsmith.trainers.losses.chunked_losses import VocabularyLoss
        from draftsmith.trainers.losses.objectives import Teacher, TeacherOutput

        class Given(Teacher):
            whole = None

            def __init__(self):
                pass

            def __call__(self, rows, log_sums_N=None):
                return TeacherOutput(logits_NQ=functional.linear(rows, weight), log_mass_N=rows.new_zeros(len(rows)))

        loss = VocabularyLoss(project=project, entries=vocabulary, weights=(1.0,) * HEADS, parameters=tuple(owned),
                              chunk_elements=options.chunk, objective="soft" if kind == "soft" else "hard",
                              teacher=Given() if kind == "soft" else None)
        return loss(Drafts(hidden_BLKD=states, offsets=tuple(range(2, 2 + HEADS))), features)[0]

    def plain(states, final, features):
        total = states.new_zeros(())
        with torch.no_grad():
            teacher = functional.linear(final, weight).softmax(-1) if kind == "soft" else None
        for step in range(HEADS):
            offset = step + 2
            labels = features.tokens_BL[0, offset:] if teacher is None else teacher[0, offset - 1 : -1]
            total = total + functional.cross_entropy(project(states[0, :-offset, step], step), labels, reduction="sum")
        return total

    def step(count):
        import draftsmith.modules.features as room

        features = room.Features(
            tokens_BL=torch.randint(vocabulary, (1, count)), supervised_BL=torch.ones(1, count, dtype=torch.bool),
            segments_BL=torch.zeros(1, count, dtype=torch.long), positions_BL=torch.arange(count)[None],
            final_BLD=torch.randn(1, count, width))
        states = torch.randn(1, count, HEADS, width, requires_grad=True)
        for parameter in owned:
            parameter.grad = None
        started = time.process_time()
        (chunked if way == "chunked" else plain)(states, features.final(), features).backward()
        return time.process_time() - started

    step(16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = min(step(tokens) for _ in range(3))
    return {"seconds": seconds, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def apart(variant: str, tokens: int, options: argparse.Namespace, vocabulary: int) -> dict[str, float]:
    """Seconds and MiB of one variant, in a new process."""
    command = [sys.executable, __file__, "--only", variant, "--tokens", str(tokens), "--width", str(options.width),
               "--vocabulary", str(vocabulary), *(["--chunk", str(options.chunk)] if options.chunk else [])]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(answer.stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the batch; peaks also at twice as many")
    parser.add_argument("--width", type=int, default=576, help="hidden size")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_768, 131_072], help="entries")
    parser.add_argument("--chunk", type=int, help="logits alive at once; the library's choice by default")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="labels and method")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options)))
        return
    print(f"{HEADS} heads, {options.tokens} tokens, width {options.width}, one thread, float32\n")
    print("| vocabulary | loss | seconds | of plain | peak MiB | of plain | peak MiB, twice the tokens |")
    print("|---|---|---|---|---|---|---|")
    for vocabulary in options.vocabulary:
        plain: dict[str, float] = {}
        for variant in options.variants:
            found = apart(variant, options.tokens, options, vocabulary)
            plain = found if variant.endswith("plain") else plain
            twice = apart(variant, 2 * options.tokens, options, vocabulary)["mib"]
            ratios = [found[name] / plain[name] for name in ("seconds", "mib")]
            print(f"| {vocabulary} | {variant} | {found['seconds']:.2f} | {ratios[0]:.2f} | {found['mib']:.0f} | "
                  f"{ratios[1]:.2f} | {twice:.0f} |", flush=True)


if __name__ == "__main__":
    main()
