"""Which shape of draft language model pays on this machine: `python tests/benchmarks/draft_sizing.py`.

Each shape is made at random beside the embedded target and timed with a text of its own; the acceptance is taken to be
the same for all, so the table ranks shapes of equal weights by their speed alone.
"""

import sys
from statistics import median

import torch
from draftsmith.modules import DraftLM, DraftLMConfig, Target, TargetConfig, Topology, load_target, measure_cost
from draftsmith.modules.tuning.draft_model_sizing import Shape, rank_shapes

ACCEPTANCE = 0.5
OUTPUTS = 4096
CANDIDATES = ((1, 576), (2, 384), (2, 576), (3, 576), (4, 384), (6, 384), (6, 576))


def shape_of(layers: int, hidden: int) -> Shape:
    heads = hidden // 64
    return Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=max(1, heads // 3), intermediate=hidden * 8 // 3,
                 outputs=OUTPUTS)


def times(target: Target, shape: Shape) -> tuple[float, float]:
    """(seconds of a draft step, seconds of a pass of the target), a chain of three."""
    config = DraftLMConfig(num_layers=shape.layers, hidden_size=shape.hidden, num_kv_heads=shape.kv_heads,
                           vocabulary_size=OUTPUTS)
    drafter = DraftLM.create(config, target, torch.arange(OUTPUTS)).eval()
    cost = measure_cost(target, drafter, Topology.chain(3), repeats=15, sizes=(1, 4))
    return cost.draft_seconds[1] / 3, cost.pass_seconds[0]


def main() -> None:
    target = load_target(TargetConfig())
    config = target.config
    whole = Shape(layers=target.num_layers, hidden=target.hidden_size, heads=config.num_attention_heads,
                  kv_heads=config.num_key_value_heads, intermediate=config.intermediate_size,
                  outputs=target.vocab_size)
    measured = {shape: times(target, shape) for shape in (shape_of(*candidate) for candidate in CANDIDATES)}
    passed = median(seconds for _, seconds in measured.values())
    by_time = rank_shapes(measured, whole, lambda _: ACCEPTANCE, seconds=lambda shape: measured[shape][0],
                          target_seconds=passed)
    by_bytes = {one.shape: one for one in rank_shapes(measured, whole, lambda _: ACCEPTANCE)}
    print(f"target pass {passed * 1e3:.1f} ms, {torch.get_num_threads()} threads, acceptance {ACCEPTANCE} assumed\n")
    print("| layers x width | weights read, M | draft step, ms | cost by bytes | cost by time | draft length | MBSU |")
    print("|---|---|---|---|---|---|---|")
    for one in by_time:
        shape = one.shape
        print(f"| {shape.layers} x {shape.hidden} | {shape.weights / 1e6:.1f} | {measured[shape][0] * 1e3:.2f} | "
              f"{by_bytes[shape].cost:.3f} | {one.cost:.3f} | {one.length} | {one.speedup:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
