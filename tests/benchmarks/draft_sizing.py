"""Shapes of draft language models, ranked by their speed-up on this machine.

    python tests/benchmarks/draft_sizing.py [--acceptance P] [--repeats N]

Each shape gets random weights and is timed with the embedded target, over a chain of three tokens. The acceptance is
assumed to be the same for all, so the table ranks shapes of equal weights by their speed alone.
"""

import argparse
from statistics import median

import torch
from draftsmith.modules import DraftLM, DraftLMConfig, Target, TargetConfig, Topology, load_target, measure_cost
from draftsmith.modules.tuning.draft_model_sizing import Shape, rank_shapes

OUTPUTS = 4096
"""Entries of the reduced vocabulary."""
CANDIDATES = ((1, 576), (2, 384), (2, 576), (3, 576), (4, 384), (6, 384), (6, 576))
"""Layers and width of each shape."""
DRAFTED = 3
"""Tokens of the timed chain."""


def shape_of(layers: int, hidden: int) -> Shape:
    """A shape with heads of 64 components, a third as many key-value heads and Llama's ratio of the MLP."""
    heads = hidden // 64
    return Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=max(1, heads // 3), intermediate=hidden * 8 // 3,
                 outputs=OUTPUTS)


def times(target: Target, shape: Shape, repeats: int) -> tuple[float, float]:
    """(seconds of a draft step, seconds of a pass of the target)."""
    config = DraftLMConfig(num_layers=shape.layers, hidden_size=shape.hidden, vocabulary_size=OUTPUTS)
    drafter = DraftLM.create(config, target, torch.arange(OUTPUTS)).eval()
    cost = measure_cost(target, drafter, Topology.chain(DRAFTED), repeats=repeats)
    return cost.draft_seconds(DRAFTED + 1) / DRAFTED, cost.pass_seconds(1)


def main() -> None:
    """Print the table, the fastest shape first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--acceptance", type=float, default=0.5, help="assumed probability that a token is accepted")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind")
    options = parser.parse_args()
    target = load_target(TargetConfig())
    config = target.config
    whole = Shape(layers=target.num_layers, hidden=target.hidden_size, heads=config.num_attention_heads,
                  kv_heads=config.num_key_value_heads, intermediate=config.intermediate_size,
                  outputs=target.vocab_size)
    measured = {shape: times(target, shape, options.repeats)
                for shape in (shape_of(*candidate) for candidate in CANDIDATES)}
    passed = median(seconds for _, seconds in measured.values())
    by_time = rank_shapes(measured, whole, lambda _: options.acceptance, seconds=lambda shape: measured[shape][0],
                          target_seconds=passed)
    by_bytes = {one.shape: one for one in rank_shapes(measured, whole, lambda _: options.acceptance)}
    print(f"target pass {passed * 1e3:.1f} ms, {torch.get_num_threads()} threads, acceptance "
          f"{options.acceptance} assumed\n")
    print("| layers x width | weights read, M | draft step, ms | cost by bytes | cost by time | draft length | MBSU |")
    print("|---|---|---|---|---|---|---|")
    for one in by_time:
        shape = one.shape
        print(f"| {shape.layers} x {shape.hidden} | {shape.weights / 1e6:.1f} | {measured[shape][0] * 1e3:.2f} | "
              f"{by_bytes[shape].cost:.3f} | {one.cost:.3f} | {one.length} | {one.speedup:.2f} |")


if __name__ == "__main__":
    main()
