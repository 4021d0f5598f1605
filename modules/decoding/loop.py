"""The one decoding loop: draft, verify, commit, observe, for any drafter, policy and batch, and without a drafter.

`Loop.run` fills free slots with waiting requests, reads their prompts, and runs rounds; `Loop._round` is a round.

Shapes: B active rows, N nodes of a tree, K nodes of a path, T places of an answer, C prompt tokens of a pass."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import Observation, Proposer, Verified
from ..policies.base import Policy
from ..target.model import Target
from ..token_tree import Lookahead, TokenTree
from ..verification.acceptance_rules import Accepted
from ..verification.sampling import SamplingSetting, log_probabilities
from .recorded_rounds import Flight, RecordedRounds, Wanted, give_back, recorder_of, taken
from .recorders import DeviceTimer, StateRecorder
from .requests import DecodeSettings, DecodeStats, Generation, Request, first_stop, room_for, shared_prefix
from .rounds import Batch, Round, ahead_states, read
from .verifier import Verifier, message

Observer = Callable[[TokenTree, Accepted, Sequence[Generation]], None]
"""Called after each pass, before its tokens are added: the trees, the accepted paths, the answer of each row. Of rounds
that are replayed it is called when one is launched: an answer may lack the tokens of the round before, and may have
ended there. It must not keep the tensors, which the next round overwrites, but what it computes of them."""
_LIKE, _FEWEST_ROWS = 0.75, 8  # Least share of the longest prompt's tokens of so many or more that are read together


class Loop:
    """Decodes a queue of requests in a fixed number of slots.

    A finished row is replaced by the next request at once; when none waits, the batch shrinks. Sampled tokens depend on
    (seed, request index, place) alone, so batch and order of the queue change no token, nor does a drafter of point
    masses. A wrong request, or a row that goes wrong, ends with `finish` "error"; the others go on. An `observer` is
    called after every pass that verifies; a `recorder` gets the target's states at every token, and a finished row then
    stays for one more pass, which reads its last token. Raises UserError if the policy makes no sense with the drafter
    or the sampling, or two requests have the same index; ValueError if a drafter comes without a policy, or does not
    tap what is recorded."""

    def __init__(self, target: Verifier, requests: Iterable[Request], settings: DecodeSettings, *,
                 drafter: Proposer | None = None, policy: Policy | None = None, observer: Observer | None = None,
                 recorder: StateRecorder | None = None) -> None:
        if (drafter is None) != (policy is None):
            raise ValueError("a drafter needs a policy and a policy needs a drafter; give both or neither")
        if drafter is not None and policy is not None:
            policy.check(drafter)
            if policy.max_size == 1:
                # Nothing but a root: the drafter is not needed.
                drafter = policy = None
        self.target, self.settings, self.drafter, self.policy = target, settings, drafter, policy
        self.observer, self.recorder = observer, recorder
        self.waiting: deque[Request] = deque()
        self.refused: list[Generation] = []
        self._admit(list(requests))
        self.stats = DecodeStats(lossless=settings.lossy is None)
        self.slots: list[Generation] = []
        size = (policy.max_size if policy is not None else 1) + room_for(self.waiting)
        nodes = size if drafter is None else size * (1 + drafter.virtual_nodes)
        longest = max((request.room for request in self.waiting), default=0)
        places = max((r.max_new_tokens for r in self.waiting), default=0) + size
        sampled = any(request.temperature > 0 for request in self.waiting)
        count = min(settings.batch_size, len(self.waiting))
        taps = () if recorder is None else recorder.taps
        if drafter is not None:
            if missing := set(taps) - set(drafter.taps):
                raise ValueError(f"layers {sorted(missing)} are recorded, but the drafter taps {drafter.taps}")
            taps = drafter.taps
        # A drafter must see every prompt token, so only plain decoding reads a common start once.
        prefix = shared_prefix([r.tokens for r in self.waiting], settings.prefill_chunk) if drafter is None else ()
        record = recorder_of(target, settings, self.waiting) if count else ""
        self.recorded: RecordedRounds | None = None
        with self._layers():
            if not isinstance(record, str):
                assert isinstance(target, Target)
                wanted = Wanted.by(target, settings, drafter, policy, rows=count, sampled=sampled, taps=taps,
                                   prefixed=bool(prefix))
                self.recorded = taken(target, wanted, settings, longest, prefix, record)
                if self.recorded.starved:
                    # Computed rounds take memory as the texts grow.
                    record, self.recorded = self.recorded.refusal, None
            self.batch = self.recorded.batch if self.recorded is not None else Batch.made(
                target, settings, drafter, policy, rows=count, slots=longest + nodes, places=places, sampled=sampled,
                taps=taps, prefix=prefix)
        self.rows, self.state, self.batch_verifier = self.batch.rows, self.batch.state, self.batch.verifier
        if recorder is not None and self.rows.shared is not None:
            recorder.add_prefix(prefix, self.rows.shared)
        self._count, self._read = count, 0
        self.stats.graph_refusal = record if isinstance(record, str) else ""
        self._flight: Flight | None = None  # The recorded round that was launched and not read
        self._records = 0 if self.recorded is None else self.recorded.records
        self._drafting = DeviceTimer(target.device)
        self._drafted = nullcontext if drafter is None else self._drafting.running  # A block that is timed as drafting

    def _round(self) -> tuple[list[list[int]], list[int], list[list[float]]]:
        """(new tokens of each active row, faults, log-probabilities if asked for): draft, verify, commit, observe."""
        work = Round(self.batch, len(self.slots))
        with self._layers():
            with self._drafted():
                # The policy grows a tree of the drafter's guesses below the newest token of each row: `work.tree`.
                work.draft()
            started_at = time.perf_counter()
            # The target reads all trees in one pass, `work.output`, and a rule of acceptance keeps one path of each,
            # with a token of the target's own after it: `work.accepted`.
            work.verify()
            # The one place of a round where the host waits for the device.
            emitted, counts, faults = read(work.host_BX.tolist())
            logprobs = work.logprobs_BK.tolist() if self.settings.logprobs else [[]] * len(counts)
            self.stats.draft_seconds += self._drafting.read()
            # Keys and values of the accepted paths stay in the cache; the tokens after them are the next roots.
            work.commit(counts)
            self.stats.target_seconds += time.perf_counter() - started_at
            with self._drafted():
                # The drafter gets the accepted tokens and the target's states at them: `work.observation`.
                work.observe(counts)
        if self.recorder is not None:
            self.recorder.add([one.request.index for one in self.slots], counts, work.observation)
        if self.observer is not None:
            self.observer(work.tree, work.accepted, self.slots)
        return emitted, faults, logprobs

    def run(self, deadline: float | None = None) -> Iterator[tuple[Generation, list[int], bool]]:
        """Yield (generation, its new tokens, whether it is finished) after every pass, row by row. After `deadline`, of
        `time.monotonic()`, no waiting request is started, and answers end as if their limit were reached, but those
        that lack of their request's `least` tokens."""
        sound = False
        try:
            yield from self._run(deadline)
            sound = True
        except GeneratorExit:
            # Nobody wants the rest of the answers.
            self._drop()
            sound = True
            raise
        finally:
            if self.recorded is not None and sound:
                give_back(self.recorded.target_rows.target, self.recorded)

    @torch.no_grad()
    def _run(self, deadline: float | None) -> Iterator[tuple[Generation, list[int], bool]]:
        for generation in self.refused:
            yield generation, [], True
        started_at = time.perf_counter()
        free = list(range(self._count))
        while True:
            if deadline is not None and time.monotonic() >= deadline:
                self.waiting = deque(one for one in self.waiting if one.least)
                for one in self.slots:
                    if not one.complete and len(one.tokens) >= max(1, one.request.least):
                        one.request = replace(one.request, max_new_tokens=len(one.tokens))
                        yield one, [], True
                yield from self._settle()
                free += [row for row in range(len(self.slots)) if row not in free and self._free(row)]
            while free and self.waiting:
                started = free[: len(self.waiting)]
                for row in started:
                    self._assign(row)
                # In groups of prompts of like length, which are read without much padding.
                lengths = {row: len(self.slots[row].request.tokens) - self._read for row in started}
                groups: list[list[int]] = []
                for row in sorted(started, key=lambda row: -lengths[row]):
                    if not groups or (len(groups[-1]) >= _FEWEST_ROWS
                                      and lengths[row] < _LIKE * lengths[groups[-1][0]]):
                        groups.append([])
                    groups[-1].append(row)
                for alike in groups:
                    yield from self._prefill(alike)
                free = [row for row in free if row not in started or self._free(row)]
            self._shrink([row for row in free if row < len(self.slots)])
            if not self.slots:
                break
            yield from self._pass()
            if any(map(self._free, range(len(self.slots)))):
                yield from self._settle()
            free = [row for row in range(len(self.slots)) if self._free(row)]
        self.stats.seconds += time.perf_counter() - started_at
        self.stats.draft_seconds += self._drafting.read()
        if self.recorded is not None:
            drafting = self.recorded.draft_seconds()
            self.stats.draft_seconds += drafting
            self.stats.target_seconds = max(0.0, self.stats.target_seconds - drafting)
            self.stats.graph_refusal = self.recorded.refusal
            self.stats.recorded_rounds = self.recorded.records - self._records

    def _admit(self, requests: list[Request]) -> None:
        """Queue the sound requests; a wrong one keeps no other from being answered."""
        indices = [request.index for request in requests]
        if len(set(indices)) < len(indices):
            # One of the answers would take the other's place.
            repeated = next(index for index in indices if indices.count(index) > 1)
            raise UserError(f"several requests have the index {repeated}; give each request of a run its own")
        for request in requests:
            if error := request.fault(self.target, self.drafter):
                self.refused.append(Generation(request, finish="error", error=error))
            else:
                self.waiting.append(request)
        if self.policy is not None:
            own = self.settings
            for temperature in sorted({request.temperature for request in self.waiting}):
                self.policy.check_sampling(SamplingSetting(temperature=temperature, top_k=own.top_k, top_p=own.top_p,
                                                           min_p=own.min_p, repetition_penalty=own.repetition_penalty))

    def _assign(self, row: int) -> None:
        """Put the next request into a row."""
        request = self.waiting.popleft()
        self.slots[row : row + 1] = [Generation(request)]
        self.batch.open(row)
        self.batch_verifier.open(row, request)
        self._read = self.rows.open(row, request.index)
        if self.recorder is not None:
            self.recorder.open(request.index, self._read)
        if self.drafter is not None:
            self.drafter.open(self.state, torch.tensor([row], device=self.target.device), reference=request.reference,
                              own_text=request.draft_tokens)

    def _free(self, row: int) -> bool:
        """True for a finished row that nothing more is recorded of."""
        return self.slots[row].complete and (self.recorder is None or self.recorder.settled(self.slots[row]))

    def _prefill(self, rows: list[int]) -> Iterator[tuple[Generation, list[int], bool]]:
        """Read the prompts of `rows`, in chunks, and take the first token of each answer."""
        started_at = time.perf_counter()
        device, chunk = self.target.device, self.settings.prefill_chunk
        prompts = [self.slots[row].request.tokens for row in rows]
        longest = max(map(len, prompts))
        rows_R = torch.tensor(rows, device=device)
        faults_R, logprobs_R = torch.zeros_like(rows_R), torch.zeros(len(rows), device=device, dtype=torch.float64)
        for offset in range(self._read, longest, chunk):
            here = [index for index, prompt in enumerate(prompts) if len(prompt) > offset]
            faults, logprobs = self._prefill_chunk([rows[i] for i in here], [prompts[i] for i in here], offset)
            # A fault stays: the states after a later chunk need not show it. Of the log-probabilities the last counts.
            faults_R[here], logprobs_R[here] = torch.maximum(faults_R[here], faults), logprobs
        found = torch.stack([self.batch.roots.values[rows_R], faults_R], dim=1).tolist()
        given = logprobs_R[:, None].tolist() if self.settings.logprobs else [[]] * len(rows)
        self.stats.prefill_seconds += time.perf_counter() - started_at
        for row, (token, fault), logprobs in zip(rows, found, given, strict=True):
            yield self.slots[row], self._take(row, [] if fault else [token], fault, logprobs), self.slots[row].complete

    def _prefill_chunk(self, rows: list[int], prompts: Sequence[tuple[int, ...]], offset: int) -> tuple[Tensor, Tensor]:
        """Read the pieces of the prompts that start at `offset`; returns the fault of each row, and the log-probability
        of the token that the target chooses after it."""
        device = self.target.device
        parts = [prompt[offset : offset + self.settings.prefill_chunk] for prompt in prompts]
        counts, width = [len(part) for part in parts], max(map(len, parts))
        tokens_BC = torch.tensor([(*part, *([0] * (width - len(part)))) for part in parts], device=device)
        counts_B, rows_R = torch.tensor(counts, device=device), torch.tensor(rows, device=device)
        last_B = counts_B - 1
        sent = TokenTree.prompts(tokens_BC, counts_B)
        with self._layers():
            if self.drafter is not None and self.drafter.virtual_nodes:
                # Virtual nodes after the last tokens of the pieces: the first trees are guesses of the target itself.
                lookahead = Lookahead.after(tokens_BC, last_B, self.drafter.virtual_nodes)
                sent = self.drafter.extended(self.state, replace(sent, lookahead=lookahead))
            output = self.rows.run(sent, rows, select_BM=last_B[:, None])
        self.stats.prefill_calls += 1
        path_BC = torch.arange(width, device=device).expand(len(rows), -1)
        self.rows.commit(path_BC, counts_B, counts, moved=False)
        chosen_B, faults_B = self.batch_verifier.first_tokens(rows, rows_R, output.logits_BMV)
        logprobs_B = torch.zeros_like(chosen_B, dtype=torch.float64)
        if self.settings.logprobs:
            logprobs_B = log_probabilities(output.logits_BMV, chosen_B[:, None])[:, 0].double()
        # The root of a prompt that goes on is its next token; the target's choice counts after the last piece alone.
        ends = [offset + count for count in counts]
        following_B = torch.tensor([prompt[end] if end < len(prompt) else -1
                                    for prompt, end in zip(prompts, ends, strict=True)], device=device)
        roots_B = torch.where(following_B >= 0, following_B, chosen_B)
        self.batch.roots.values[rows_R] = roots_B
        verified = None
        if self.drafter is not None and self.drafter.reads_logits:
            last_B1 = last_B[:, None]
            verified = Verified(
                tokens_BM=tokens_BC.gather(1, last_B1), real_BM=torch.ones_like(last_B1, dtype=torch.bool),
                logits_BMV=output.logits_BMV, places_BM=last_B1)
        observation = Observation(tokens_BN=tokens_BC, counts_B=counts_B, final_BND=output.final_BND[:, :width],
                                  taps={layer: states[:, :width] for layer, states in output.taps.items()},
                                  roots_B=roots_B, verified=verified, ahead=ahead_states(sent, output, last_B),
                                  host_rows=rows, host_counts=counts, prompt=True)
        # The mask of a prompt is as large as its length squared, and the drafter makes one of its own.
        del sent
        if self.recorder is not None:
            self.recorder.add([self.slots[row].request.index for row in rows], counts, observation)
        if self.drafter is not None and self.state is not None:
            with self._layers(), self._drafting.running():
                self.drafter.observe(self.state, rows_R, observation)
        return faults_B, logprobs_B

    def _pass(self) -> Iterator[tuple[Generation, list[int], bool]]:
        """Draft, verify and commit once for all active rows. A recorded round is read when the next one is launched,
        but where the host needs its states."""
        recorded, active = self.recorded, len(self.slots)
        if recorded is None or recorded.refusal:
            yield from self._given(*self._round())
            return
        ahead = self._flight is not None
        if ahead and (recorded.shape(active, ahead) not in recorded.made or all(
                len(one.tokens) + 1 >= one.request.max_new_tokens for one in self.slots)):
            # Nothing else may be under way while a round is recorded; nor is one needed after the answers' last.
            yield from self._settle()
            return
        started_at = time.perf_counter()
        with self._layers():
            work = recorded.next(active, ahead)
        if work is None:
            return
        flight, self._flight = self._flight, work.launch()
        self.stats.target_seconds += time.perf_counter() - started_at
        if self.observer is not None:
            self.observer(*work.of_first(active), self.slots)
        if self.recorder is not None:
            flight, self._flight = self._flight, None
        if flight is not None:
            yield from self._landed(flight)

    def _settle(self) -> Iterator[tuple[Generation, list[int], bool]]:
        """Read what was launched: rows may start, end or move afterwards."""
        if all(one.complete for one in self.slots):
            self._drop()
        elif self._flight is not None:
            flight, self._flight = self._flight, None
            yield from self._landed(flight)

    def _drop(self) -> None:
        """Forget a launched round that no answer needs: what went wrong in it must not stay in the cache."""
        flight, self._flight = self._flight, None
        for row, fault in enumerate([] if flight is None else flight.read()[2]):
            if fault:
                self.rows.wipe(row)

    def _landed(self, flight: Flight) -> Iterator[tuple[Generation, list[int], bool]]:
        """The results of a launched round."""
        assert self.recorded is not None
        started_at = time.perf_counter()
        emitted, counts, faults, logprobs = flight.read()
        self.recorded.advance(flight, counts)
        self.stats.target_seconds += time.perf_counter() - started_at
        if self.recorder is not None:
            self.recorder.add([one.request.index for one in self.slots], counts, flight.work.observation)
        yield from self._given(emitted, faults, logprobs)

    def _given(self, emitted: list[list[int]], faults: list[int], logprobs: list[list[float]]
               ) -> Iterator[tuple[Generation, list[int], bool]]:
        """The answers of all active rows, grown by the tokens of a pass."""
        self.stats.target_calls += 1
        self.stats.busy_slots += sum(not generation.complete for generation in self.slots)
        self.stats.total_slots += self._count
        for row, (tokens, fault) in enumerate(zip(emitted, faults, strict=True)):
            generation = self.slots[row]
            if generation.complete:
                # It has stayed for the states of its last token.
                if fault:
                    self._wipe(row)
                continue
            kept = self._take(row, tokens, fault, logprobs[row])
            if kept or not fault:
                generation.emitted.append(len(kept))
            yield generation, kept, generation.complete

    @contextmanager
    def _layers(self) -> Iterator[None]:
        """A block whose passes run the layers in the forms that the settings ask for."""
        if not self.settings.compile:
            yield
            return
        compiler, before = self.target.compiler, self.target.compiler.seconds
        with ExitStack() as blocks:
            blocks.enter_context(self.target.compiled())
            if self.drafter is not None:
                blocks.enter_context(self.drafter.compiled(compiler))
            yield
        self.stats.compile_seconds += compiler.seconds - before
        self.stats.compile_refusal = compiler.refusal

    def _shrink(self, finished: list[int]) -> None:
        """Close finished rows; the last rows move into their places, so that the others stay where they are."""
        if not finished:
            return
        staying = [row for row in range(len(self.slots)) if row not in set(finished)]
        order = list(range(len(staying)))
        late = [row for row in staying if row >= len(staying)]
        for hole, row in zip((row for row in finished if row < len(staying)), late, strict=True):
            order[hole] = row
        self.slots = [self.slots[row] for row in order]
        self.batch.keep(order)

    def _take(self, row: int, tokens: list[int], fault: int, logprobs: list[float]) -> list[int]:
        """Append what a pass's tokens add to the answer of a row, up to its limit, end token or stop text; returns it.
        After a fault the row ends with its error, unless these tokens already ended the answer: the fault lies
        after."""
        generation = self.slots[row]
        kept = tokens[: generation.request.max_new_tokens - len(generation.tokens)]
        if not self.settings.ignore_eos:
            eos_ids = self.target.eos_ids if self.settings.eos_ids is None else self.settings.eos_ids
            ends = [place for place, token in enumerate(kept) if token in eos_ids]
            if ends:
                kept, generation.finish = kept[: ends[0] + 1], "eos"
        if self.settings.stop:
            prompt = generation.request.tokens if self.settings.stop_from_prompt else ()
            cut = first_stop(self.target.tokenizer, generation.tokens, kept, self.settings.stop, prompt)
            if cut is not None:
                kept, generation.finish = kept[:cut], "stop"
        generation.tokens.extend(kept)
        generation.logprobs.extend(logprobs[: len(kept)])
        if fault:
            if not generation.complete:
                generation.finish, generation.error = "error", message(fault, generation, self.target.vocab_size)
            self._wipe(row)
        return kept

    def _wipe(self, row: int) -> None:
        """Drop what a row that went wrong has left: NaN keys and values would reach the next sequence of the row even
        through a mask (0 * NaN is NaN)."""
        self.rows.wipe(row)
        if self.recorder is not None:
            self.recorder.drop(self.slots[row].request.index)
