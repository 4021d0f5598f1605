"""The one decoding loop: draft, verify, commit, for any drafter, policy and batch, and without a drafter.

Shapes: B active rows, N nodes of a tree, K nodes of a path, T places of an answer, C prompt tokens of a pass.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .acceptance import Accepted, Sampling, choose, follow
from .drafter import DraftState, Observation, Proposer, Verified
from .errors import UserError
from .policies import Policy
from .requests import DecodeResult, DecodeSettings, DecodeStats, Generation, Request, uniform_stream
from .target import PassOutput
from .tree import TokenTree, Topology


class Rows(Protocol):
    """A batch of sequences inside something that answers tree passes: `TargetRows`, or stored text."""

    def run(self, tree: TokenTree, rows: list[int] | None = None, select_BM: Tensor | None = None) -> PassOutput: ...

    def commit(self, path_BK: Tensor, counts_B: Tensor, host_counts: list[int], *, moved: bool = True) -> None: ...

    def open(self, row: int, index: int) -> None: ...

    def keep(self, order: list[int]) -> None: ...


class Verifier(Protocol):
    """What the loop asks of a target."""

    @property
    def device(self) -> torch.device: ...

    @property
    def context_length(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def tokenizer(self) -> Any: ...

    def start(self, rows: int, capacity: int, taps: Sequence[int] = ()) -> Rows: ...


@dataclass
class _Slot:
    """A row that is decoding."""

    generation: Generation
    uniforms_T: Tensor | None


class Loop:
    """Decodes a queue of requests in a fixed number of slots.

    A finished row is replaced by the next request at once; when none waits, the batch shrinks. Sampled tokens depend on
    (seed, request index, place) alone, so batch, drafter and order of the queue change no token.

    Args:
        target: the verifier.
        requests: what to continue.
        settings: what the requests share.
        drafter: proposes; None decodes plainly.
        policy: how its trees grow; needed with a drafter.

    Raises:
        UserError: if a prompt with its answer does not fit the target's context.
    """

    def __init__(
        self,
        target: Verifier,
        requests: Iterable[Request],
        settings: DecodeSettings,
        *,
        drafter: Proposer | None = None,
        policy: Policy | None = None,
    ) -> None:
        if (drafter is None) != (policy is None):
            raise ValueError("a drafter needs a policy and a policy needs a drafter; give both or neither")
        self.target, self.settings, self.drafter, self.policy = target, settings, drafter, policy
        self.waiting = deque(requests)
        for request in self.waiting:
            _check_context(request, target)
        self.stats = DecodeStats()
        self.slots: list[_Slot] = []
        size = policy.max_size if policy is not None else 1
        longest = max((len(r.tokens) + r.max_new_tokens for r in self.waiting), default=0)
        self.places = max((r.max_new_tokens for r in self.waiting), default=0) + size
        self.sampled = any(request.temperature > 0 for request in self.waiting)
        count = min(settings.batch_size, len(self.waiting))
        self.rows = target.start(count, longest + size, drafter.taps if drafter else ())
        self.state: DraftState | None = drafter.start(count, longest + size) if drafter is not None else None
        self._reads_logits = drafter is not None and drafter.reads_logits
        self.roots_B = torch.zeros(count, dtype=torch.long, device=target.device)
        self._count = count
        self._plain = Topology.chain(0)

    @torch.no_grad()
    def run(self, deadline: float | None = None) -> Iterator[tuple[Generation, list[int], bool]]:
        """Yield (generation, its new tokens, whether it is finished) after every pass, row by row.

        Args:
            deadline: value of `time.monotonic()` after which no waiting request is started.
        """
        began = time.perf_counter()
        free = list(range(self._count))
        while True:
            if deadline is not None and time.monotonic() >= deadline:
                self.waiting.clear()
            while free and self.waiting:
                started = [row for row in free if self._assign(row)]
                yield from self._prefill(started)
                free = [row for row in free if row not in started or self._done(row)]
            self._shrink([row for row in free if row < len(self.slots)])
            if not self.slots:
                break
            yield from self._pass()
            free = [row for row in range(len(self.slots)) if self._done(row)]
        self.stats.seconds += time.perf_counter() - began

    def _assign(self, row: int) -> bool:
        """Put the next request into a row; False when none waits."""
        if not self.waiting:
            return False
        request = self.waiting.popleft()
        uniforms = None
        if request.temperature > 0:
            stream = uniform_stream(self.settings.seed, request.index, self.places)
            uniforms = torch.from_numpy(stream).to(self.target.device)
        slot = _Slot(Generation(request), uniforms)
        if row < len(self.slots):
            self.slots[row] = slot
        else:
            self.slots.append(slot)
        self.rows.open(row, request.index)
        if self.drafter is not None and self.state is not None:
            self.drafter.clear(self.state, torch.tensor([row], device=self.target.device))
        return True

    def _done(self, row: int) -> bool:
        generation = self.slots[row].generation
        return generation.finish != "length" or len(generation.tokens) >= generation.request.max_new_tokens

    # Prompts ---------------------------------------------------------------------------------------------------------

    def _prefill(self, rows: list[int]) -> Iterator[tuple[Generation, list[int], bool]]:
        """Read the prompts of `rows`, in chunks, and take the first token of each answer."""
        began = time.perf_counter()
        device, chunk = self.target.device, self.settings.prefill_chunk
        prompts = [self.slots[row].generation.request.tokens for row in rows]
        longest = max(map(len, prompts))
        rows_R = torch.tensor(rows, device=device)
        for offset in range(0, longest, chunk):
            here = [index for index, prompt in enumerate(prompts) if len(prompt) > offset]
            self._prefill_chunk([rows[i] for i in here], [prompts[i] for i in here], offset)
        self.stats.prefill_seconds += time.perf_counter() - began
        for row, token in zip(rows, self.roots_B[rows_R].tolist(), strict=True):
            generation = self.slots[row].generation
            self._extend(generation, [token])
            yield generation, [token], self._done(row)

    def _prefill_chunk(self, rows: list[int], prompts: Sequence[tuple[int, ...]], offset: int) -> None:
        device = self.target.device
        parts = [prompt[offset : offset + self.settings.prefill_chunk] for prompt in prompts]
        counts, width = [len(part) for part in parts], max(map(len, parts))
        tokens_BC = torch.tensor([(*part, *([0] * (width - len(part)))) for part in parts], device=device)
        counts_B, rows_R = torch.tensor(counts, device=device), torch.tensor(rows, device=device)
        output = self.rows.run(TokenTree.prompts(tokens_BC, counts_B), rows, select_BM=(counts_B - 1)[:, None])
        self.stats.prefill_calls += 1
        path_BC = torch.arange(width, device=device).expand(len(rows), -1)
        self.rows.commit(path_BC, counts_B, counts, moved=False)
        chosen_B = choose(
            output.logits_BMV, self._uniforms(rows, depths_BN=torch.zeros_like(counts_B)[:, None]), self._sampling(rows)
        )[:, 0]
        following = [
            prompt[offset + len(part)] if offset + len(part) < len(prompt) else -1
            for prompt, part in zip(prompts, parts, strict=True)
        ]
        following_B = torch.tensor(following, device=device)
        roots_B = torch.where(following_B >= 0, following_B, chosen_B)
        self.roots_B[rows_R] = roots_B
        verified = None
        if self._reads_logits:
            last_B1 = counts_B[:, None] - 1
            verified = Verified(
                tokens_BM=tokens_BC.gather(1, last_B1),
                real_BM=torch.ones_like(last_B1, dtype=torch.bool),
                logits_BMV=output.logits_BMV,
                places_BM=last_B1,
            )
        self._observe(
            rows_R,
            Observation(
                tokens_BN=tokens_BC,
                counts_B=counts_B,
                final_BND=output.final_BND,
                taps=output.taps,
                roots_B=roots_B,
                verified=verified,
            ),
        )

    # Passes ----------------------------------------------------------------------------------------------------------

    def _pass(self) -> Iterator[tuple[Generation, list[int], bool]]:
        """Draft, verify and commit once for all active rows."""
        active = list(range(len(self.slots)))
        tree = self._draft()
        began = time.perf_counter()
        output = self.rows.run(tree)
        choices_BN = choose(output.logits_BMV, self._uniforms(active, tree.depths_BN), self._sampling(active))
        accepted = follow(tree, choices_BN)
        emitted, counts = _to_host(tree, accepted)
        self.rows.commit(accepted.path_BK, accepted.counts_B, counts, moved=tree.size > 1)
        self.stats.target_seconds += time.perf_counter() - began
        self.roots_B = accepted.bonus_B
        verified = _verified(tree, accepted, output) if self._reads_logits else None
        self._observe(
            torch.arange(len(active), device=self.target.device), _observation(tree, accepted, output, verified)
        )
        self.stats.target_calls += 1
        self.stats.busy_slots += len(active)
        self.stats.total_slots += self._count
        for row, tokens in enumerate(emitted):
            generation = self.slots[row].generation
            kept = self._extend(generation, tokens)
            generation.emitted.append(len(kept))
            yield generation, kept, self._done(row)

    def _draft(self) -> TokenTree:
        if self.drafter is None or self.policy is None or self.state is None:
            return self._plain.plant(self.roots_B[:, None])
        began = time.perf_counter()
        tree = self.policy.grow(self.drafter, self.state, self.roots_B)
        self.stats.draft_seconds += time.perf_counter() - began
        return tree

    def _observe(self, rows_R: Tensor, observation: Observation) -> None:
        if self.drafter is not None and self.state is not None:
            began = time.perf_counter()
            self.drafter.observe(self.state, rows_R, observation)
            self.stats.draft_seconds += time.perf_counter() - began

    def _sampling(self, rows: list[int]) -> Sampling:
        temperatures = [self.slots[row].generation.request.temperature for row in rows] if self.sampled else []
        return Sampling(
            temperature_B=torch.tensor(temperatures, device=self.target.device),
            top_k=self.settings.top_k,
            top_p=self.settings.top_p,
            sampled=any(t > 0 for t in temperatures),
        )

    def _uniforms(self, rows: list[int], depths_BN: Tensor) -> Tensor:
        """The uniform number of each node's choice: that of the place the chosen token would take."""
        if not self.sampled:
            return depths_BN
        columns = []
        for row, depths_N in zip(rows, depths_BN, strict=True):
            slot = self.slots[row]
            if slot.uniforms_T is None:
                columns.append(torch.zeros(depths_N.shape[0], dtype=torch.float64, device=depths_N.device))
            else:
                columns.append(slot.uniforms_T[len(slot.generation.tokens) + depths_N])
        return torch.stack(columns)

    def _shrink(self, finished: list[int]) -> None:
        """Close finished rows; the last rows move into their places, so that the others stay where they are."""
        if not finished:
            return
        staying = [row for row in range(len(self.slots)) if row not in set(finished)]
        order = list(range(len(staying)))
        late = [row for row in staying if row >= len(staying)]
        for hole, row in zip((row for row in finished if row < len(staying)), late, strict=True):
            order[hole] = row
        order_R = torch.tensor(order, dtype=torch.long, device=self.target.device)
        self.rows.keep(order)
        self.slots = [self.slots[row] for row in order]
        self.roots_B = self.roots_B[order_R]
        if self.drafter is not None and self.state is not None:
            self.drafter.keep(self.state, order_R)

    def _extend(self, generation: Generation, tokens: list[int]) -> list[int]:
        """Append what still belongs to the answer: up to its limit, its end token or its stop text."""
        kept = tokens[: generation.request.max_new_tokens - len(generation.tokens)]
        if not self.settings.ignore_eos:
            ends = [place for place, token in enumerate(kept) if token in self.target.eos_ids]
            if ends:
                kept, generation.finish = kept[: ends[0] + 1], "eos"
        if self.settings.stop:
            cut = first_stop(self.target.tokenizer, generation.tokens, kept, self.settings.stop)
            if cut is not None:
                kept, generation.finish = kept[:cut], "stop"
        generation.tokens.extend(kept)
        return kept


def decode(
    target: Verifier,
    requests: Sequence[Request],
    settings: DecodeSettings,
    *,
    drafter: Proposer | None = None,
    policy: Policy | None = None,
    on_tokens: Callable[[Generation, list[int], bool], None] | None = None,
    deadline: float | None = None,
) -> DecodeResult:
    """Continue all requests.

    Args:
        target: a `Target`, or a `Replay` of stored text.
        requests: prompts with their limits; their indices must differ.
        settings: batch size, sampling filters, stop texts.
        drafter: proposes tokens; None decodes plainly.
        policy: how its trees grow.
        on_tokens: called with (generation, its new tokens, whether it finished) after every pass.
        deadline: value of `time.monotonic()` after which no waiting request is started.

    Raises:
        UserError: if a prompt with its answer does not fit the target's context.
    """
    finished: dict[int, Generation] = {}
    loop = Loop(target, requests, settings, drafter=drafter, policy=policy)
    for generation, tokens, done in loop.run(deadline):
        if on_tokens is not None:
            on_tokens(generation, tokens, done)
        if done:
            finished[generation.request.index] = generation
    ordered = [finished[request.index] for request in requests if request.index in finished]
    return DecodeResult(ordered, loop.stats)


def stream(
    target: Verifier,
    request: Request,
    settings: DecodeSettings,
    *,
    drafter: Proposer | None = None,
    policy: Policy | None = None,
) -> Iterator[list[int]]:
    """Continue one request and yield its new tokens pass by pass."""
    for _generation, tokens, _done in Loop(target, [request], settings, drafter=drafter, policy=policy).run():
        yield tokens


def first_stop(tokenizer: Any, before: Sequence[int], new: Sequence[int], stops: Sequence[str]) -> int | None:
    """How many of the new tokens complete the first stop text, or None."""
    for count in range(1, len(new) + 1):
        text = tokenizer.decode([*before, *new[:count]], skip_special_tokens=False)
        if any(stop in text for stop in stops):
            return count
    return None


def _to_host(tree: TokenTree, accepted: Accepted) -> tuple[list[list[int]], list[int]]:
    """(new tokens of each row: accepted nodes below the root and the bonus, nodes on each path), in one transfer."""
    path_tokens_BK = tree.tokens_BN.gather(1, accepted.path_BK)
    together = torch.cat([accepted.counts_B[:, None], accepted.bonus_B[:, None], path_tokens_BK], dim=1).tolist()
    return [[*row[3 : 2 + row[0]], row[1]] for row in together], [row[0] for row in together]


def _observation(
    tree: TokenTree, accepted: Accepted, output: PassOutput, verified: Verified | None = None
) -> Observation:
    path_BK = accepted.path_BK

    def along(states_BND: Tensor) -> Tensor:
        return states_BND.gather(1, path_BK[..., None].expand(-1, -1, states_BND.shape[-1]))

    return Observation(
        tokens_BN=tree.tokens_BN.gather(1, path_BK),
        counts_B=accepted.counts_B,
        final_BND=along(output.final_BND),
        taps={layer: along(states) for layer, states in output.taps.items()},
        roots_B=accepted.bonus_B,
        verified=verified,
    )


def _verified(tree: TokenTree, accepted: Accepted, output: PassOutput) -> Verified:
    width = accepted.path_BK.shape[1]
    columns_K = torch.arange(width, device=tree.tokens_BN.device)
    places_BK = torch.where(columns_K < accepted.counts_B[:, None], columns_K, -1)
    # Padding columns of a path hold their own index, which may be a node that is on it: the larger place is right.
    places_BN = torch.full_like(tree.tokens_BN, -1).scatter_reduce(1, accepted.path_BK, places_BK, "amax")
    return Verified(tokens_BM=tree.tokens_BN, real_BM=tree.real_BN, logits_BMV=output.logits_BMV, places_BM=places_BN)


def _check_context(request: Request, target: Verifier) -> None:
    total = len(request.tokens) + request.max_new_tokens
    if total > target.context_length:
        raise UserError(
            f"prompt {request.index} has {len(request.tokens)} tokens and asks for {request.max_new_tokens} more, but "
            f"the target's context holds {target.context_length}; shorten the prompt or lower max_new_tokens"
        )
