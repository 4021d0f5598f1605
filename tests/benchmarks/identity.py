"""Greedy answers of every drafter, 100,000 tokens in all, compared with transformers' `generate` in float32.

    python tests/benchmarks/identity.py [--tokens N] [--target NAME] [--batch-size N] [--out DIR]

Random, always wrong and always right drafts, a mixture of them in static and dynamic trees, and every drafter that
needs no training continue the handwritten prompts, in batches. A first difference is allowed only where the target's
own logits nearly tie (gap below 1e-4), at most once in 10,000 tokens; each is printed. Exits with 1 when that rule is
broken.

A killed run goes on where it stopped. A reference comes from a padded batch; where an answer differs from it, the
reference is made once more, alone and unpadded, before anything is blamed on the drafts.

Shapes: B rows, N new tokens, S rows of a state, F frontier nodes, M nodes of a tree, C candidates of a node.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from against_transformers import chat_prompts
from draftsmith.export.evaluation.contention import machine
from draftsmith.export.evaluation.lossless import Judge, generate, native_model
from draftsmith.export.evaluation.results import Comparison
from draftsmith.modules import (
    BASELINES,
    DEFAULT_NAME,
    Chain,
    DecodeSettings,
    DraftState,
    DySpecTree,
    Eagle2Tree,
    Frontier,
    Generation,
    Observation,
    Policy,
    Proposer,
    Request,
    Scores,
    StaticTree,
    Target,
    TargetConfig,
    baseline,
    decode,
    load_target,
)
from draftsmith.modules.baselines.token_recycling import recycling_tree
from torch import Tensor

ALLOWED_EVERY = 10_000
"""Number of tokens for which one near-tie may be decided differently."""
MARGIN = 1.24
"""Factor by which more tokens are requested than needed, since answers may end early."""
CANDIDATES = 4
"""Number of guesses that a scripted drafter makes for each node."""
REFERENCE = "generate"
"""Method name of the references among the stored answers."""


class ScriptState(DraftState):
    """The reference answer of each row, the number of tokens emitted, and the depth of each node of the tree."""

    def __init__(self, rows: int) -> None:
        self.answers: list[tuple[int, ...]] = [()] * rows
        self.emitted = [0] * rows
        self.depths_BM: Tensor | None = None


class Script(Proposer):
    """A drafter that knows the answers and is right, wrong, or right by chance; or that knows nothing."""

    family = "script"

    def __init__(self, known: dict[tuple[int, ...], tuple[int, ...]], share: float | None, vocab_size: int) -> None:
        self.known, self.share, self.vocab_size = known, share, vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def start(self, rows: int, capacity: int) -> ScriptState:
        """Rows that have read nothing yet."""
        return ScriptState(rows)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        """The first observation of a row is its prompt; later ones count its tokens."""
        held = _script(state)
        held.depths_BM = None
        counts = observation.counts_B.tolist()
        for row, count, tokens in zip(rows_R.tolist(), counts, observation.tokens_BN.tolist(), strict=True):
            if held.emitted[row] == 0:
                held.answers[row], held.emitted[row] = self.known[tuple(tokens[:count])], 1
            else:
                held.emitted[row] += count

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        """A few guesses for each node, in random order of likelihood."""
        held, shape = _script(state), (*frontier.nodes_BF.shape, 1, CANDIDATES)
        depths_BF = self._depths(held, frontier)
        truths_BF = torch.tensor([
            [answer[place + depth] if place + depth < len(answer) else 0 for depth in depths]
            for answer, place, depths in zip(held.answers, held.emitted, depths_BF.tolist(), strict=False)
        ])
        ids_BFHC = torch.randint(self.vocab_size, shape, generator=self.generator)
        scores_BFHC = torch.rand(shape, generator=self.generator)
        if self.share is not None:
            missed_BFHC = truths_BF[..., None, None] + 1 + torch.arange(CANDIDATES)
            ids_BFHC = missed_BFHC % self.vocab_size
            hit_BF = torch.rand(truths_BF.shape, generator=self.generator) < self.share
            ids_BFHC[..., 0, 0] = torch.where(hit_BF, truths_BF, ids_BFHC[..., 0, 0])
            # A drafter that is always right ranks the right token first; any other may rank it anywhere.
            scores_BFHC[..., 0, 0] += float(self.share == 1)
        return Scores(log_probs_BFHQ=scores_BFHC.log_softmax(-1), candidates_BFHQ=ids_BFHC)

    def _depths(self, held: ScriptState, frontier: Frontier) -> Tensor:
        """Depth of each frontier node, stored for its children."""
        nodes = int(frontier.nodes_BF.max()) + 1
        before_BM = frontier.nodes_BF[:, :0] if held.depths_BM is None else held.depths_BM
        missing = max(0, nodes - before_BM.shape[1])
        before_BM = torch.nn.functional.pad(before_BM, (0, missing))
        above_BF = before_BM.gather(1, frontier.parents_BF.clamp(min=0))
        depths_BF = torch.where(frontier.parents_BF < 0, 0, above_BF + 1)
        held.depths_BM = before_BM.scatter(1, frontier.nodes_BF, depths_BF)
        return depths_BF

    def clear(self, state: DraftState, rows_R: Tensor) -> None:
        """Prepare these rows for other prompts."""
        for row in rows_R.tolist():
            _script(state).emitted[row] = 0

    def keep(self, state: DraftState, rows_R: Tensor) -> None:
        """Make the former row rows_R[r] the row r."""
        held, order = _script(state), rows_R.tolist()
        held.answers, held.emitted = [held.answers[row] for row in order], [held.emitted[row] for row in order]
        held.depths_BM = None


def _script(state: DraftState) -> ScriptState:
    assert isinstance(state, ScriptState)
    return state


Way = Callable[[], tuple[Proposer, Policy]]


def ways(target: Target, known: dict[tuple[int, ...], tuple[int, ...]]) -> dict[str, Way]:
    """Every drafter and policy by name."""

    def script(share: float | None) -> Script:
        return Script(known, share, target.vocab_size)

    def untrained(name: str) -> Way:
        return lambda: baseline(name, target)

    return {
        "random, tree of 8": lambda: (script(None), StaticTree(recycling_tree(8))),
        "always wrong, chain of 3": lambda: (script(0.0), Chain(3)),
        "oracle, chain of 7": lambda: (script(1.0), Chain(7)),
        "oracle, tree of 16": lambda: (script(1.0), StaticTree(recycling_tree(16))),
        "right by chance, tree of 16": lambda: (script(0.7), StaticTree(recycling_tree(16))),
        "right by chance, EAGLE-2 tree of 12": lambda: (script(0.7), Eagle2Tree(12, 4, 3)),
        "right by chance, DySpec tree of 12": lambda: (script(0.7), DySpecTree(12, 4, 3)),
        **{name: untrained(name) for name in BASELINES},
        "ngrams, DySpec tree of 8": lambda: (baseline("ngrams", target)[0], DySpecTree(8, 3, 3)),
        "recycling, EAGLE-2 tree of 12": lambda: (baseline("recycling", target)[0], Eagle2Tree(12, 4, 3)),
    }


@dataclass(frozen=True)
class Answer:
    """One stored answer."""

    way: str
    prompt: int
    tokens: tuple[int, ...]
    passes: int


class Store:
    """Answers in a file, one a line; a line that a kill cut short is dropped."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.answers: dict[tuple[str, int], Answer] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        if whole and json.loads(whole[0]) != header:
            sys.exit(f"{path} holds answers of other settings ({whole[0].strip()}); choose another --out or delete it")
        for line in whole[1:]:
            fields = json.loads(line)
            self._keep(Answer(fields["way"], fields["prompt"], tuple(fields["tokens"]), fields["passes"]))
        path.write_text("".join(whole) or json.dumps(header) + "\n", encoding="utf-8")

    def _keep(self, answer: Answer) -> None:
        self.answers[answer.way, answer.prompt] = answer

    def add(self, answer: Answer) -> None:
        """Store an answer, on disk too."""
        self._keep(answer)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")

    def missing(self, way: str, prompts: int) -> list[int]:
        """Prompts without a stored answer of a method."""
        return [prompt for prompt in range(prompts) if (way, prompt) not in self.answers]


def refer(target: Target, prompts: Sequence[tuple[int, ...]], new_tokens: int, batch: int, store: Store) -> None:
    """Answer every prompt by transformers' `generate`, in batches of prompts of like length."""
    missing = sorted(store.missing(REFERENCE, len(prompts)), key=lambda prompt: len(prompts[prompt]))
    for start in range(0, len(missing), batch):
        chosen = missing[start : start + batch]
        with native_model(target) as model:
            found = generate(model, target, [prompts[prompt] for prompt in chosen], max_new_tokens=new_tokens)
        for prompt, tokens in zip(chosen, found, strict=True):
            store.add(Answer(REFERENCE, prompt, tuple(tokens), len(tokens)))
        report(f"{REFERENCE}: {start + len(chosen)} of {len(missing)} answers")


def draft(target: Target, name: str, way: Way, prompts: Sequence[tuple[int, ...]], new_tokens: int, batch: int,
          store: Store) -> None:
    """Answer every prompt by a drafter."""
    requests = [Request(prompts[prompt], prompt, new_tokens) for prompt in store.missing(name, len(prompts))]

    def keep(generation: Generation, _tokens: list[int], done: bool) -> None:
        if done:
            store.add(Answer(name, generation.request.index, tuple(generation.tokens), generation.passes))

    if requests:
        started = time.monotonic()
        drafter, policy = way()
        decode(target, requests, DecodeSettings(batch_size=batch), drafter=drafter, policy=policy, on_tokens=keep)
        report(f"{name}: {len(requests)} answers in {time.monotonic() - started:.0f} s")


@dataclass(frozen=True)
class Verdict:
    """One method, compared with the references."""

    way: str
    tokens: int
    passes: int
    accepted_length: float
    divergences: tuple[dict[str, Any], ...]

    @property
    def unexplained(self) -> int:
        """Number of differences that no near-tie explains."""
        return sum(not divergence["near_tie"] for divergence in self.divergences)

    @property
    def largest_gap(self) -> float:
        """Largest gap of a divergence; 0 without one."""
        return max((divergence["gap"] or 0.0 for divergence in self.divergences), default=0.0)


class Comparer:
    """Compares stored answers; a reference that was decoded again is kept for the other methods."""

    def __init__(self, target: Target, prompts: Sequence[tuple[int, ...]], new_tokens: int, store: Store) -> None:
        self.target, self.prompts, self.new_tokens, self.store = target, prompts, new_tokens, store
        self.judge, self.alone = Judge(target), dict[int, list[int]]()

    def verdict(self, way: str) -> Verdict:
        """Verdict on all answers of a method."""
        answers = [self.store.answers[way, prompt] for prompt in range(len(self.prompts))]
        compared = [(answer, self._compared(answer)) for answer in answers]
        passes = sum(answer.passes for answer in answers)
        # The first token of an answer comes from its prompt's pass.
        drafted = sum(len(answer.tokens) - 1 for answer in answers)
        return Verdict(
            way=way,
            tokens=sum(len(answer.tokens) for answer in answers),
            passes=passes,
            accepted_length=drafted / passes,
            divergences=tuple(
                {"prompt": answer.prompt, "place": found.divergence, "gap": found.gap, "near_tie": found.near_tie}
                for answer, found in compared if found.divergence is not None
            ),
        )

    def _compared(self, answer: Answer) -> Comparison:
        reference = self.store.answers[REFERENCE, answer.prompt].tokens
        request = Request(self.prompts[answer.prompt], answer.prompt, self.new_tokens)
        return self.judge.compare(request, answer.tokens, reference, again=lambda: self._alone(answer.prompt))

    def _alone(self, prompt: int) -> list[int]:
        if prompt not in self.alone:
            with native_model(self.target) as model:
                found = generate(model, self.target, [self.prompts[prompt]], max_new_tokens=self.new_tokens)
            self.alone[prompt] = found[0]
        return self.alone[prompt]


def table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The rows of the printed table."""
    yield "| drafter | tokens | passes | accepted length | divergences | largest gap | verdict |"
    yield "|---|---|---|---|---|---|---|"
    for verdict in verdicts:
        gap = f"{verdict.largest_gap:.1e}" if verdict.divergences else ""
        word = "identical" if not verdict.divergences else "near-ties only" if not verdict.unexplained else "BROKEN"
        yield (f"| {verdict.way} | {verdict.tokens:,} | {verdict.passes:,} | {verdict.accepted_length:.2f} | "
               f"{len(verdict.divergences)} | {gap} | {word} |")


def broken(verdicts: Sequence[Verdict], wanted: int) -> str:
    """The reason why the identity rule is broken or was not tested; empty when it holds."""
    tokens, unexplained = sum(v.tokens for v in verdicts), sum(v.unexplained for v in verdicts)
    ties = sum(len(v.divergences) for v in verdicts)
    if unexplained:
        return f"{unexplained} answers differ where the target's logits do not tie"
    if ties * ALLOWED_EVERY > max(tokens, ALLOWED_EVERY):
        return f"{ties} near-ties were decided differently in {tokens:,} tokens, more than one in {ALLOWED_EVERY:,}"
    if tokens < wanted:
        return f"only {tokens:,} of {wanted:,} tokens were decoded: answers ended early; ask for more tokens"
    return ""


def report(line: str) -> None:
    """Print a line of progress without delay."""
    print(line, flush=True)


def main() -> int:
    """Decode, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=100_000, help="drafted tokens, over all drafters")
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--prompts", type=int, default=80, help="handwritten prompts used")
    parser.add_argument("--batch-size", type=int, default=16, help="rows")
    parser.add_argument("--out", type=Path, default=Path("runs/identity"),
                        help="folder of the answers; a stopped run continues there")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    target = load_target(TargetConfig(name=options.target, device="cpu", dtype="float32"))
    prompts = chat_prompts(target, options.prompts, target.context_length // 2)
    new_tokens = round(options.tokens * MARGIN / len(prompts) / len(ways(target, {}))) + 1
    header = {"target": target.identity.weights_hash, "prompts": len(prompts), "new_tokens": new_tokens}
    store = Store(options.out / "answers.jsonl", header)
    refer(target, prompts, new_tokens, options.batch_size, store)
    known = {prompt: store.answers[REFERENCE, place].tokens for place, prompt in enumerate(prompts)}
    named = ways(target, known)
    for name, way in named.items():
        draft(target, name, way, prompts, new_tokens, options.batch_size, store)
    comparer = Comparer(target, prompts, new_tokens, store)
    verdicts = [comparer.verdict(name) for name in named]
    reason = broken(verdicts, options.tokens)
    where = machine(target)
    (options.out / "identity.json").write_text(json.dumps(
        {**header, **where, "verdicts": [asdict(verdict) for verdict in verdicts], "broken": reason}, indent=2) + "\n",
        encoding="utf-8")
    report(f"{options.target}, {where['dtype']}, {where['machine']['processor']}, torch {torch.__version__}, "
           f"transformers {transformers.__version__}; {len(prompts)} prompts, at most {new_tokens} tokens each")
    for line in table(verdicts):
        report(line)
    for verdict in verdicts:
        for divergence in verdict.divergences:
            report(f"{verdict.way}: {divergence}")
    report(f"{sum(verdict.tokens for verdict in verdicts):,} tokens: {reason or 'the identity rule holds'}")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
