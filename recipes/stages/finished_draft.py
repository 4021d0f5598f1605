"""A trained drafter made ready for use: its tree searched on held-out answers, and the sizes of the tree tried on this
machine.

Shapes: P places where a draft starts, K draft steps."""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...export import Tuning
from ...modules import JOINED, STATIC, Drafter, Features, Target, Topology, measure_cost
from ...modules.interfaces.proposer import JudgesGuesses
from ...modules.tuning.acceptance_examples import calibrate_judgement
from ...modules.tuning.tree_search import ranked_text, search_tree
from ...modules.tuning.trials import SIZES, SIZING_TEMPERATURE, trials
from ..recipe import TreeConfig


class Searched(NamedTuple):
    """A drafter as it decodes, with its tree."""

    drafter: Drafter  # A copy in the target's number format, bound to it
    tables: Sequence[Tensor]  # Ranks [P, K] of the answers that chose no checkpoint, and of the others
    topology: Topology  # The tree that was searched on all of them
    expected: tuple[float, ...]  # Its expected accepted length by nodes


def searched(trained: Drafter, target: Target, held_out: Sequence[Features], nodes: int) -> Searched:
    """Search the tree of a drafter on encoded answers of the target; what a drafter keeps of such answers is set in it
    and in the copy."""
    with target.reproducible(), torch.no_grad():
        drafter = copy.deepcopy(trained).to(device=target.device, dtype=target.dtype)
        drafter.bind(target)
        drafter.eval()
        # The first, third, ... row chose no checkpoint (`held_out_acceptance`): these report, and the others choose.
        tables = [ranked_text(drafter, part).ranks_PK for part in (held_out[0::2], held_out[1::2])
                  if part or not held_out]
    table_PK = torch.cat(tables)
    for one in (trained, drafter):
        one.count_ranks(table_PK)
    if isinstance(trained, JudgesGuesses) and trained.judges:
        trained.judge_temperatures_K.copy_(calibrate_judgement(drafter, held_out))
    return Searched(drafter, tables, *search_tree(table_PK, nodes))


def tuned(draft: Searched, target: Target, held_out: Sequence[Features], unread: Sequence[Features],
          drawn: Sequence[Features], tree: TreeConfig, most: int) -> Tuning:
    """Measure passes and try sizes of the tree, on the answers of the search, those `unread` by it, and drawn ones; of
    an answer `most` tokens are decoded."""
    cost = measure_cost(target, draft.drafter, draft.topology)
    # Each half is decoded with a tree that was searched on the other; the artifact's own tree was searched on both.
    trees = [search_tree(part_PK, tree.searched_nodes)[0] for part_PK in draft.tables]
    texts = (list(zip([held_out[1::2] or held_out, unread], trees, strict=False)),
             [(part, draft.topology) for part in (drawn[1::2] or drawn, drawn[0::2])[: len(drawn)]])
    sizes = sorted({min(size, draft.topology.size) for size in ([tree.used_nodes] if tree.used_nodes else SIZES)})
    with target.reproducible():
        tried = [trials(draft.drafter, target, halves, cost, sizes, most) for halves in texts]
    # Outside, where the target has the forms in which the seconds were measured.
    return Tuning.of(target, cost, *tried, used_nodes=tree.used_nodes)


def sizes_in_words(tuning: Tuning, topology: Topology) -> Iterator[str]:
    """Sentences on what one row drafts on this machine, greedy and sampled."""
    used = [one for temperature in (0.0, SIZING_TEMPERATURE) for kind in (STATIC, JOINED)
            if (one := tuning.best(kind, 1, temperature)) is not None]
    answers = "that did not choose it" if all(one.reported for one in used) else "of which too few did not choose it"
    yield f"tree of {topology.size} nodes; of it is used on this machine, by held-out answers {answers}:"
    for temperature in (0.0, SIZING_TEMPERATURE):
        fastest, said = tuning.fastest(1, temperature), list[str]()
        for kind in sorted((STATIC, JOINED), key=lambda one: one != fastest):
            best, told = tuning.best(kind, 1, temperature), tuning.prediction(kind, 1, temperature)
            if best is not None and told is not None:
                said.append(f"{best.policy}, {told.accepted_length:.2f} tokens per pass and {told.speedup:.2f} times "
                            "the speed without drafts predicted")
        yield (f"at temperature {temperature:g} " if temperature else "greedy ") + (
            " (next: ".join(said) + ")" * (len(said) > 1) or "none, drafting does not pay")
    if tuning.cost.contended:
        yield ("the machine was busy with other programs while these passes were timed, so the size may not be the "
               "fastest and nothing is switched off by it; delete tuning.json and repeat the run on a quiet machine")
