"""The memory of a recipe's stages, counted on tensors without values: passes of the target, training steps, decoding.

Shapes: B rows, L positions, N nodes of a tree, C tokens of a prompt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from ...data.batches.learned_tokens import prompts_learnable
from ...modules import Features, Target, TokenTree, Topology
from ...modules.target.kv_cache import FIRST_SLOTS
from ...modules.tuning.ranked_text import ranked_text
from ...trainers import DraftModule
from ...trainers.losses.chunked_losses import CHUNK_ELEMENTS
from ..recipe import Recipe
from .counted_work import CountedWork, blank_tensors

TEMPLATE_TOKENS = 32  # Tokens of a chat template around a prompt
USUAL_PROMPT = 256  # Tokens of the longest prompt where nothing limits them
ROW_CONVERSATIONS = 16  # Most conversations of a planned row: they cost the time of planning, but no memory


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Most bytes alive in the parts of a training step on one micro-batch, beyond weights and what was there before."""

    target: int  # The target's pass; 0 where training reads no states
    states: int  # The target's states that the step reads
    forward: int  # The loss with its gradients of the logits
    whole: int  # Loss and gradients of the weights
    gradients: int  # The gradients of the weights


class PlannedWork:
    """A recipe's target, of `sketch_target`, and its training module, of `dry_run`, without values; their tensors are
    replaced and the memory counted. An accelerator is counted as a CPU in its number formats, with its chunks of the
    loss."""

    def __init__(self, recipe: Recipe, target: Target, module: DraftModule, *, accelerator: bool) -> None:
        self.recipe, self.target, self.module = recipe, target, module
        module.chunk_elements = CHUNK_ELEMENTS["cuda" if accelerator else "cpu"]
        # Families that train in stages take most in the last one.
        vars(module)["progress_at"] = lambda _step: 1.0
        self.count = CountedWork()
        made: dict[int, Tensor] = {}
        models: list[nn.Module] = [target.model, module]
        models += [learning.target.model for learning in [getattr(module, "learning", None)] if learning is not None]
        for model in models:
            blank_tensors(model, self.count, made)
        with self.count:
            module.drafter.bind(target)
        self.borrowed = self.count.live  # Bytes of the target's output rows that a reduced draft vocabulary selects

    # Training --------------------------------------------------------------------------------------------------------

    def step(self, mixed: bool) -> StepWork:
        """A training step on one micro-batch; the drafter computes in bfloat16 if `mixed`."""
        module, batch = self.module.train(), self.batch()
        before = self.count.live
        target = 0
        with self._counting():
            if module.needs_states:
                batch = self.target.encode(batch, module.drafter.taps)
                target = self._work(before)
            states, start = self.count.live - before, self.count.live
            self.count.restart()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                learned = module.loss(batch)
            forward = self._work(start)
            learned.total.backward()  # type: ignore[no-untyped-call]
            whole = self._work(start)
        gradients = sum(weight.grad.nbytes for weight in module.parameters() if weight.grad is not None)
        module.zero_grad()
        return StepWork(target=target, states=states, forward=forward, whole=whole, gradients=gradients)

    def batch(self) -> Features:
        """A micro-batch of packed conversations, as long as the recipe lets them be, whose answers are learned."""
        recipe, ids_Q = self.recipe, self.module.drafter.token_ids_Q
        rows, length = recipe.batch.rows_per_batch, recipe.batch.row_length
        each = min(length, max(opening(recipe) + recipe.distill.max_new_tokens, -(-length // ROW_CONVERSATIONS)))
        learns_prompts = recipe.batch.own_prompts and prompts_learnable(vars(recipe.prompts))
        learns_all = learns_prompts or "text" in recipe.distill.shares
        order_L = torch.arange(length)
        first = 1 if learns_all else min(opening(recipe), each - 1)
        return Features(tokens_BL=torch.full((rows, length), 0 if ids_Q is None else int(ids_Q[0])),
                        supervised_BL=(order_L % each >= first).repeat(rows, 1),
                        segments_BL=(order_L // each).repeat(rows, 1), positions_BL=(order_L % each).repeat(rows, 1))

    # Held-out text ---------------------------------------------------------------------------------------------------

    def held_out(self) -> int:
        """A held-out conversation: the target's pass over it, and the drafter's proposals along it."""
        length = min(opening(self.recipe) + self.recipe.distill.max_new_tokens, self.target.context_length)
        row = Features(
            tokens_BL=torch.zeros(1, length, dtype=torch.int64), supervised_BL=(torch.arange(length) > 0)[None],
            segments_BL=torch.zeros(1, length, dtype=torch.int64), positions_BL=torch.arange(length)[None])
        self.module.eval()
        before = self.count.live
        with self._counting(), torch.no_grad():
            encoded = self.target.encode(row, self.module.drafter.taps)
            ranked_text(self.module.drafter, [encoded])
            return self._work(before)

    # Decoding --------------------------------------------------------------------------------------------------------

    def reading(self, rows: int, tokens: int) -> int:
        """Reading of the prompts of a batch in one piece, cache included."""
        before = self.count.live
        with self._counting(), torch.no_grad():
            held = self.target.start(rows, tokens)
            self._read(held, rows, tokens)
            del held
            return self._work(before)

    def decoding(self, rows: int, prompt: int, answer: int, nodes: int, taps: tuple[int, ...] = ()) -> int:
        """Decoding of a batch from its prompts to its longest answers. The cache grows as it does in decoding: in the
        last growth, which takes most, the old slots and the new ones of a few layers are alive together."""
        before, longest = self.count.live, prompt + answer + nodes
        tree = Topology.chain(nodes - 1).plant(torch.zeros(rows, nodes, dtype=torch.int64))
        with self._counting(), torch.no_grad():
            held = self.target.start(rows, longest, taps)
            self._read(held, rows, prompt)
            for width in (*list(grown(prompt, longest))[-1:], longest):
                held.cache.assume(width - nodes)
                logits_BNV = held.run(tree).logits_BMV
                chosen_BN = logits_BNV.float().softmax(-1).argmax(-1)
                del logits_BNV, chosen_BN
            del held
            return self._work(before)

    def _read(self, held: Any, rows: int, tokens: int) -> None:
        prompts = TokenTree.prompts(torch.zeros(rows, tokens, dtype=torch.int64), torch.full((rows,), tokens))
        output = held.run(prompts, select_BM=torch.full((rows, 1), tokens - 1))
        del output

    def _work(self, before: int) -> int:
        return self.count.peak - before

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """A block that is counted from zero."""
        with patch.object(moe, "_grouped_mm", _one_expert), self.count:
            self.count.restart()
            yield


def _one_expert(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """The products of tokens sorted by expert, as if all had the first one: as many, and as large."""
    return input.to(weight.dtype) @ weight[0]


def opening(recipe: Recipe) -> int:
    """Longest prompt in tokens, with the template's own: as far as a recipe tells."""
    prompts = recipe.prompts
    if prompts.origin == "own":
        return TEMPLATE_TOKENS + prompts.own_max_tokens
    return TEMPLATE_TOKENS + (prompts.max_prompt_tokens or USUAL_PROMPT)


def grown(prompt: int, longest: int) -> Iterator[int]:
    """Lengths of a row at which its cache grows, see `RowCache`."""
    held = min(longest, max(prompt, FIRST_SLOTS))
    while held < longest:
        yield held + 1
        held = min(longest, max(held + 1, held + held // 2))
