"""The interface of a target to the decoding loop, and the verification of a batch: temperatures, random numbers and
penalties of its rows, applied to each pass.

A row that goes wrong ends, the others finish: codes of its errors travel with the accepted tokens in the one transfer
of a pass, and words are made on the host.

Shapes: R rows held, B of them active, N nodes, M nodes with logits, K nodes of a path, V vocabulary, T places."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import VerifiedRows
from ..row_buffers import RowBuffer
from ..target.devices.compiled_layers import Compiler
from ..target.loading.generation_defaults import TokenBiases
from ..target.target_rows import PassOutput
from ..token_tree import TokenTree
from ..verification.acceptance_rules import Accepted, Chances, exact_rule
from ..verification.sampling import Draws, Sampling, choose, penalise, uniform_stream, widened
from .constraints import GrammarRow, Path, RowRules, constrained, paths_of
from .requests import DecodeResult, DecodeSettings, Generation, Request

SOUND, LOGITS, TOKEN, PARENT, DRAFT, NOTHING = range(6)
_MESSAGES = {
    LOGITS: "the target's logits are NaN or infinite after token {place} of the answer; run the target in a wider "
    "number type, or check its weights",
    TOKEN: "the drafter proposed a token outside the target's vocabulary (ids 0 to {last}) after token {place} of the "
    "answer; check the ids of its draft vocabulary",
    PARENT: "the draft tree after token {place} of the answer has a node whose parent does not come before it; a "
    "policy must list parents first",
    DRAFT: "the drafter's probabilities are NaN or infinite after token {place} of the answer; check its weights",
    NOTHING: "no token may follow token {place} of the answer: one of its grammar, its processors and the biases of "
    "tokens rules out what the others leave; drop one of them",
}


class DecodeError(UserError):
    """Some rows of a batch failed; all the others were finished and are in `result`."""

    def __init__(self, result: DecodeResult) -> None:
        failed = [generation for generation in result.generations if generation.finish == "error"]
        others = len(result.generations) - len(failed)
        text = "; ".join(generation.error for generation in failed)
        super().__init__(text if not others else f"{text} ({others} other answers are in this error's result)")
        self.result = result  # Every generation; failed ones have `finish` "error", their tokens so far and `error`


def message(code: int, generation: Generation, vocab_size: int) -> str:
    """The sentence for a fault of one row, which names its request."""
    text = _MESSAGES[code].format(place=len(generation.tokens), last=vocab_size - 1)
    return f"prompt {generation.request.index}: {text}"


def screen(tree: TokenTree, vocab_size: int) -> tuple[TokenTree, Tensor]:
    """(the tree, with nothing but a root in faulty rows; the fault of each row, [B], int64)."""
    # Padding counts too: ids that the target does not know cannot be embedded.
    outside_BN = (tree.tokens_BN < 0) | (tree.tokens_BN >= vocab_size)
    faults_B = examine(tree, outside_BN)
    # On the CPU it is known at once that nothing is wrong; reading the answer from an accelerator would wait for it.
    sound = faults_B.device.type == "cpu" and not bool(outside_BN.any() | faults_B.any())
    return (tree if sound else pruned(tree, faults_B, outside_BN)), faults_B


def examine(tree: TokenTree, outside_BN: Tensor) -> Tensor:
    """The fault of each row's tree, [B], int64, with marks at nodes whose token the target does not know."""
    columns_N = torch.arange(tree.size, device=tree.tokens_BN.device)
    late_BN = ((tree.parents_BN >= columns_N) | (tree.parents_BN < 0)) & (columns_N > 0)
    # Of several faults of a row the last one here is reported.
    faults_B = torch.where((outside_BN & tree.real_BN).any(-1), TOKEN, SOUND)
    faults_B = torch.where((late_BN & tree.real_BN).any(-1), PARENT, faults_B)
    if tree.drawn is not None:
        largest_B = tree.drawn.log_q_BIQ.amax((1, 2))
        faults_B = torch.where(largest_B.isnan() | (largest_B == torch.inf), DRAFT, faults_B)
    return faults_B


def pruned(tree: TokenTree, faults_B: Tensor, outside_BN: Tensor) -> TokenTree:
    """The tree with nothing but a root in faulty rows, and with ids that the target knows everywhere."""
    columns_N = torch.arange(tree.size, device=faults_B.device)
    faulty_B1 = (faults_B > 0)[:, None]
    itself_NN = columns_N[:, None] == columns_N
    return replace(tree, tokens_BN=tree.tokens_BN.masked_fill(outside_BN, 0),
                   parents_BN=torch.where(faulty_B1, columns_N - 1, tree.parents_BN),
                   depths_BN=torch.where(faulty_B1, 0, tree.depths_BN),
                   ancestors_BNN=torch.where(faulty_B1[..., None], itself_NN, tree.ancestors_BNN),
                   real_BN=tree.real_BN & (~faulty_B1 | (columns_N == 0)))


class Rows(VerifiedRows, Protocol):
    """A batch of sequences inside something that answers tree passes: `TargetRows`, or stored text."""

    shared: PassOutput | None  # The pass over the prefix that all rows start with; None where no such pass was run

    def run(self, tree: TokenTree, rows: list[int] | None = None, select_BM: Tensor | None = None) -> PassOutput: ...

    def commit(self, path_BK: Tensor, counts_B: Tensor, host_counts: list[int], *, moved: bool = True) -> None: ...

    def open(self, row: int, index: int) -> int: ...

    def wipe(self, row: int) -> None: ...

    def keep(self, order: list[int]) -> None: ...


class Verifier(Protocol):
    """A target, or stored text in its place."""

    tokenizer: Any
    compiler: Compiler  # Compiles its layers and those of the drafter
    vocab_size: int
    eos_ids: tuple[int, ...]
    biases: TokenBiases

    @property
    def device(self) -> torch.device: ...

    @property
    def context_length(self) -> int: ...

    def compiled(self) -> AbstractContextManager[None]: ...

    def start(self, rows: int, capacity: int, taps: Sequence[int] = (), prefix: Sequence[int] = ()) -> Rows: ...


class AppliedBiases:
    """The biases of all rows as tensors, which a replayed pass reads where they are."""

    def __init__(self, biases: TokenBiases, eos_ids: tuple[int, ...], vocab_size: int, device: torch.device) -> None:
        self.least, added = biases.least_tokens, dict(biases.added)
        ids, not_first, ends = range(vocab_size), set(biases.not_first), set(eos_ids)
        self.added_V = torch.tensor([added.get(token, 0.0) for token in ids], device=device)
        self.not_first_V = torch.tensor([token in not_first for token in ids], device=device)
        self.ends_V = torch.tensor([token in ends for token in ids], device=device)
        never_V = self.added_V == -torch.inf
        for more_V in (self.not_first_V, *([self.ends_V] if self.least else [])):
            if bool((never_V | more_V).all()):
                raise UserError("the biases of tokens rule all of them out (suppress_tokens, min_new_tokens, ...); "
                                "leave some of them in")

    def add(self, logits_BMV: Tensor, places_BM: Tensor) -> Tensor:
        """The logits [B, M, V] in float32 or wider with the biases added; `places_BM` are the places of the next tokens
        in their answers, from 0."""
        ruled_out_BMV = ((places_BM < 1)[..., None] & self.not_first_V) | (
            (places_BM < self.least)[..., None] & self.ends_V)
        return (widened(logits_BMV) + self.added_V).masked_fill(ruled_out_BMV, -torch.inf)


class BatchVerifier:
    """Holds temperatures, random numbers and tokens read of every row, all on the device. An answer has at most
    `places` tokens, the largest tree included; `sampled` if any request has a temperature above 0."""

    def __init__(self, settings: DecodeSettings, rows: int, places: int, verifier: Verifier, sampled: bool) -> None:
        vocab_size, device = verifier.vocab_size, verifier.device
        self.settings, self.vocab_size, self.sampled = settings, vocab_size, sampled
        self._device, self._samples = device, [False] * rows
        # What is decided on the host, of rows that have anything of it; what it rules out all tokens of.
        self.rules: list[RowRules | None] = [None] * rows
        self._nothing: set[tuple[int, int]] = set()
        self._tokenizer = verifier.tokenizer
        blank = partial(RowBuffer, rows, device=device, dtype=torch.long)
        self.temperatures, self.requests, self.places = blank(dtype=torch.float32), blank(), blank()
        self.uniforms = blank(places if sampled else 1, dtype=torch.float64)
        self.seen = blank(vocab_size, dtype=torch.bool) if settings.repetition_penalty != 1.0 else None
        self.last = blank()
        biases = verifier.biases if settings.biases is None else settings.biases
        self.eos_ids = verifier.eos_ids if settings.eos_ids is None else settings.eos_ids
        self._on_texts = biases
        self.biases = None if biases.alone == TokenBiases() else AppliedBiases(
            biases, self.eos_ids, vocab_size, device)
        # On the device, so that a replayed pass draws by the seed of its own call.
        self.seed = torch.zeros((), dtype=torch.long, device=device)
        self.restart(settings)

    @property
    def buffers(self) -> list[RowBuffer]:
        """All that is held of the rows."""
        found = (self.temperatures, self.requests, self.places, self.uniforms, self.seen, self.last)
        return [buffer for buffer in found if buffer is not None]

    def restart(self, settings: DecodeSettings) -> None:
        """Serve another call, with settings that differ in the seed alone, as far as the device is concerned."""
        self.settings = settings
        # As a signed number: the same 64 bits.
        self.seed.fill_((settings.seed + 2**63) % 2**64 - 2**63)

    def open(self, row: int, request: Request) -> None:
        """Start a request in a row."""
        self.temperatures.values[row], self.requests.values[row] = request.temperature, request.index
        self.places.values[row] = 0
        self._samples[row] = request.temperature > 0
        before, after = self._on_texts.processors(len(request.tokens) + request.max_new_tokens, self._device)
        self.rules[row] = None
        if before or after or request.processors or request.grammar is not None:
            grammar = None if request.grammar is None else GrammarRow(request.grammar.compiled(
                self._tokenizer, self.vocab_size, self.eos_ids), self._tokenizer, self.vocab_size, self.eos_ids)
            self.rules[row] = RowRules([*request.tokens], before, [*after, *request.processors], grammar)
        if self._samples[row]:
            stream = uniform_stream(self.settings.seed, request.index, self.uniforms.values.shape[1])
            self.uniforms.values[row] = torch.from_numpy(stream)
        if self.seen is not None:
            self.seen.values[row] = False
            self.seen.values[row, list(request.tokens)] = True
            self.last.values[row] = request.tokens[-1]

    def keep(self, order: list[int], order_R: Tensor) -> None:
        """Row r is the former row order[r]; the others leave."""
        self._samples = [*(self._samples[row] for row in order), *[False] * (len(self._samples) - len(order))]
        self.rules = [*(self.rules[row] for row in order), *[None] * (len(self.rules) - len(order))]
        for buffer in self.buffers:
            buffer.keep(order_R)

    def draws(self, rows: int) -> Draws | None:
        """Random numbers for drafting the next trees of the first `rows` rows; None when every request is greedy."""
        if not self.sampled:
            return None
        return Draws(seed=self.seed, requests_B=self.requests.values[:rows],
                     places_B=self.places.values[:rows], temperature_B=self.temperatures.values[:rows])

    def first_tokens(self, rows: list[int], rows_B: Tensor, logits_BMV: Tensor) -> tuple[Tensor, Tensor]:
        """(first token of each answer, fault of each row) after a piece of the prompts; M is 1."""
        # Logits that hold NaN or +inf, or nothing but -inf; some models forbid tokens by a single -inf.
        unreadable_BM = ~logits_BMV.amax(-1).isfinite()
        # A long prompt is read in pieces, each of which ends with the first token as far as is known.
        self._nothing.clear()
        start_B1 = torch.zeros_like(rows_B)[:, None]
        logits_BMV = self._adjusted(logits_BMV, rows_B, start_B1, start_B1, self.last.values[rows_B, None, None],
                                    [[()]] * len(self.rules) if any(self.rules) else [])
        sampled = [place for place, row in enumerate(rows) if self._samples[row]]
        chosen_BM = choose(logits_BMV, self.uniforms.values[rows_B, :1], self._sampling(rows_B, sampled))
        self.places.values[rows_B] = 1
        faults_B = torch.where(unreadable_BM[:, 0], LOGITS, 0)
        for place, row in enumerate(rows):
            if (row, 0) in self._nothing:
                faults_B[place] = torch.where(faults_B[place] > 0, faults_B[place], NOTHING)
        return chosen_BM[:, 0], faults_B

    def constrained(self, tree: TokenTree) -> TokenTree:
        """The trees of the first rows as their grammars allow and force them."""
        grammars = [None if rules is None else rules.grammar for rules in self.rules[: len(tree.tokens_BN)]]
        return constrained(tree, grammars) if any(grammars) else tree

    def verify(self, tree: TokenTree, logits_BNV: Tensor, faults_B: Tensor, *,
               any_rows: bool = False) -> tuple[Accepted, Tensor]:
        """(the accepted paths, the fault of each row) of a pass of the first rows. `any_rows` may sample when the pass
        is replayed, not only those that sample now."""
        rows = len(tree.tokens_BN)
        unreadable_BN = ~logits_BNV.amax(-1).isfinite()
        self._nothing.clear()
        ruled = any(self.rules[:rows])
        paths = paths_of(tree) if ruled else []

        def adjust(logits_RMV: Tensor, rows_R: Tensor, nodes_RM: Tensor) -> Tensor:
            # A node is penalised for the path down to it; columns that are off its path repeat the root.
            nodes, tokens_RN = (rows_R[:, None], nodes_RM), tree.tokens_BN[rows_R]
            paths_RMN = torch.where(tree.ancestors_BNN[nodes], tokens_RN[:, None, :], tokens_RN[:, :1, None])
            places_RM = self.places.values[rows_R, None] + tree.depths_BN[nodes]
            return self._adjusted(logits_RMV, rows_R, nodes_RM, places_RM, paths_RMN, paths)

        draws = self.draws(rows)
        if draws is None:
            choices_BN = tests_BN = torch.zeros_like(tree.tokens_BN, dtype=torch.float64)
        else:
            # The places beyond an answer's limit are padding: their tokens are cut off.
            places_BN = (draws.places_B[:, None] + tree.depths_BN).clamp(max=self.uniforms.values.shape[1] - 1)
            choices_BN = self.uniforms.values[:rows].gather(1, places_BN)
            tests_BN = choices_BN if tree.drawn is None else draws.tests(tree.size)
        rule = self.settings.lossy or exact_rule(tree)
        sampled = [row for row in range(rows) if self._samples[row] or (any_rows and self.sampled)]
        sampling = replace(self._sampling(torch.arange(rows, device=self._device), sampled),
                           adjust=adjust if self.biases or self.seen or ruled else None)
        accepted = rule.accept(tree, logits_BNV, sampling, Chances(choices_BN=choices_BN, tests_BN=tests_BN))
        self.places.values[:rows] += accepted.counts_B
        real_BK = torch.arange(accepted.path_BK.shape[1], device=self._device) < accepted.counts_B[:, None]
        if self.seen is not None:
            # Columns beyond a path hold nodes that were not accepted: they mark the root once more.
            path_BK = torch.where(real_BK, tree.tokens_BN.gather(1, accepted.path_BK), tree.tokens_BN[:, :1])
            self.seen.values[:rows].scatter_(1, path_BK, True)
        for rules, path, count in zip(self.rules, tree.tokens_BN.gather(1, accepted.path_BK).tolist(),
                                      accepted.counts_B.tolist(), strict=False) if ruled else ():
            if rules is not None:
                rules.take(tuple(path[:count]))
        # A path ends at its first node whose logits say nothing: after it the bonus token means nothing. Nodes that are
        # not accepted have no part in what is emitted.
        codes_BN = torch.where(unreadable_BN, LOGITS, SOUND)
        for row, node in self._nothing:
            codes_BN[row, node] = torch.where(unreadable_BN[row, node], LOGITS, NOTHING)
        codes_BK = codes_BN.gather(1, accepted.path_BK) * real_BK
        lost_B, first_B = (codes_BK > 0).any(-1), (codes_BK > 0).long().argmax(-1)
        counts_B = torch.where(lost_B, first_B + 1, accepted.counts_B)
        codes_B = codes_BK.gather(1, first_B[:, None])[:, 0]
        return replace(accepted, counts_B=counts_B), torch.where(faults_B == 0, codes_B, faults_B)

    def _adjusted(self, logits_RMV: Tensor, rows_R: Tensor, nodes_RM: Tensor, places_RM: Tensor, paths_RMN: Tensor,
                  paths: Sequence[Sequence[Path]]) -> Tensor:
        """Logits of the next tokens at some nodes, at these places of the answers, after these paths, with all that is
        done to them before temperature and filters, in transformers' order."""
        rows = rows_R.tolist() if paths else []
        # Each with the logits at its node, the path to it, and the node.
        places = [(rules, (place, column), paths[row][node], (row, node))
                  for place, (row, nodes) in enumerate(zip(rows, nodes_RM.tolist(), strict=True) if rows else ())
                  for column, node in enumerate(nodes) if (rules := self.rules[row]) is not None]
        logits_RMV = widened(logits_RMV).clone() if places else logits_RMV
        for rules, place, path, _ in places:
            logits_RMV[place] = rules.apply(logits_RMV[place], path, rules.before)
        if self.biases is not None:
            logits_RMV = self.biases.add(logits_RMV, places_RM)
        if self.seen is not None:
            logits_RMV = penalise(widened(logits_RMV), self.settings.repetition_penalty, self.seen.values[rows_R],
                                  paths_RMN)
        for rules, place, path, node in places:
            logits_RMV[place] = rules.apply(logits_RMV[place], path, rules.after)
            if rules.grammar is not None:
                forbidden_V = ~rules.grammar.allowed(path).to(logits_RMV.device)
                logits_RMV[place] = logits_RMV[place].masked_fill(forbidden_V, -torch.inf)
            if not bool((logits_RMV[place] > -torch.inf).any()):
                self._nothing.add(node)
        return logits_RMV

    def _sampling(self, rows_B: Tensor, sampled: Sequence[int]) -> Sampling:
        return Sampling(temperature_B=self.temperatures.values[rows_B], top_k=self.settings.top_k,
                        top_p=self.settings.top_p, min_p=self.settings.min_p, sampling_rows=tuple(sampled))
