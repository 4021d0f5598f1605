"""Rules of what may follow a text, which look at the text alone and are applied node by node of a tree: processors of
logits, a budget of thinking, and a grammar, whose matcher walks the tree and goes back with it.

Shapes: B rows, N nodes, L tokens of a text, V target vocabulary, Q draft vocabulary."""

import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UserError
from ..interfaces.proposer import spread
from ..policies.base import trimmed
from ..policies.ensemble import joined
from ..token_tree import Drawn, TokenTree

Processor = Callable[[Any, Any], Any]
"""A pure function of a text [1, L] and the logits after it [1, V], as a `LogitsProcessor` of transformers is called."""
Path = tuple[int, ...]  # Tokens of the nodes from the root down to one
MOST_FORCED = 16  # Most nodes that a grammar adds to a tree
_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tokens before and after thinking: of Qwen3, DeepSeek-R1 and the like, of Magistral, of Seed-OSS."""
_STATE = ("SynthID", "ClassifierFreeGuidance")  # In names of transformers' processors that keep what they have seen


def fault_of(processors: Sequence[Processor], text: Sequence[int], vocab_size: int, device: torch.device) -> str:
    """The reason why one of the processors is no pure function of (text, logits); empty where all are. Each of a user's
    own is tried twice on texts that branch, as those of a tree do: it must say the same of each, and note nothing after
    its first call, in which it may make tensors."""
    logits_1V = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    first, second = ((text[-1] + step) % vocab_size for step in (1, 2))
    texts = [torch.tensor([[*text, *more]], device=device)
             for more in ((), (first,), (first, second), (second,), (second, first))]
    for one in processors:
        name = getattr(one, "__name__", type(one).__name__)
        remedy = f"processor {name} {{}}; give a function of (text, logits) alone"
        if type(one).__module__.startswith("transformers.generation") and not any(word in name for word in _STATE):
            continue
        notes, seen = set[bytes](), list[Tensor]()
        try:
            for text_1L in [*texts, *texts]:
                seen.append(one(text_1L, logits_1V.clone()).clone())
                # A function, or a handle of another language, cannot be written; what it says must tell.
                with suppress(TypeError, AttributeError, ValueError, pickle.PicklingError):
                    notes.add(pickle.dumps(vars(one)))
        except Exception as error:  # noqa: BLE001 Whatever a user's code raises
            said = str(error) or type(error).__name__
            return remedy.format(f"fails on a text that does not continue the one before ({said})")
        if wrong := [list(found.shape) for found in seen if found.shape != logits_1V.shape]:
            return remedy.format(f"returns the shape {wrong[0]} for logits of {list(logits_1V.shape)}")
        again = zip(seen[: len(texts)], seen[len(texts) :], strict=True)
        if len(notes) > 1 or not all(torch.equal(*pair) for pair in again):
            return remedy.format("has a state, which the branches of a tree would mix up")
    return ""


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """A processor that ends each stretch of thinking after a number of tokens: its end mark is forced there. A text
    thinks where its last begin mark stands after its last end mark; tokens of the prompt do not count. Raises UserError
    for a negative number."""

    tokens: int  # Most tokens of thinking
    begin: int  # The mark before thinking
    end: int  # The mark after it
    prompt: int  # Tokens of the prompt

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise UserError(f"thinking_tokens must be at least 0, got {self.tokens}")

    @classmethod
    def of(cls, tokenizer: Any, tokens: int, prompt: int) -> "ThinkingBudget":
        """The budget in the marks that the tokenizer has as tokens of their own; UserError where it has none."""
        known = tokenizer.get_vocab()
        for begin, end in _MARKS:
            if begin in known and end in known:
                return cls(tokens=tokens, begin=known[begin], end=known[end], prompt=prompt)
        raise UserError(f"thinking_tokens is {tokens}, but the target does not think: its tokenizer has none of "
                        f"{', '.join(begin for begin, _ in _MARKS)}; leave it out")

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        text = input_ids[0].tolist()
        opened, closed = (len(text) - text[::-1].index(mark) if mark in text else 0 for mark in (self.begin, self.end))
        if opened <= closed or len(text) - max(opened, self.prompt) < self.tokens:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.end] = 0.0
        return forced


@dataclass(frozen=True)
class Grammar:
    """The form of an answer: a JSON schema, a regular expression, or a grammar in the EBNF of llama.cpp with the rule
    `root`. Raises UserError if the library xgrammar is missing, or cannot compile it."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str

    def __post_init__(self) -> None:
        kind = _library().Grammar
        read = {"json_schema": kind.from_json_schema, "regex": kind.from_regex, "grammar": kind.from_ebnf}
        try:
            read[self.kind](self.text)
        except RuntimeError as error:
            # What the library says stands after a time and a place in its own code.
            said = re.sub(r"^\[[^]]*\] \S+: (Check failed: .* is false: )?", "", str(error).strip()).splitlines()[0]
            raise UserError(f"{self.kind} cannot be compiled: {said}; change it") from error

    def compiled(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
        """The grammar over the tokens of a target; UserError for one without an end token."""
        if not eos_ids:
            raise UserError(f"a {self.kind} ends answers by an end token, and the target has none; name one "
                            "(DecodeSettings.eos_ids)")
        compiler = _compiler(tokenizer, vocab_size, eos_ids)
        return getattr(compiler, f"compile_{self.kind}")(self.text)


def _library() -> Any:
    """The library of grammars; UserError where it is not installed."""
    try:
        import xgrammar
    except ImportError as error:
        raise UserError("structured output takes the library xgrammar; install draftsmith[structured]") from error
    return xgrammar


@lru_cache(maxsize=4)
def _compiler(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """The compiler of a tokenizer, which remembers what it has compiled; made in half a second."""
    library = _library()
    known = library.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos_ids))
    return library.GrammarCompiler(known, max_threads=1)


class GrammarRow:
    """The place of a row's answer in a grammar, and what may follow on the paths of a tree below it."""

    def __init__(self, compiled: Any, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._matcher, self._tokenizer = _library().GrammarMatcher(compiled), tokenizer
        self._bits = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32)
        self._ends_V = torch.zeros(vocab_size, dtype=torch.bool)
        self._ends_V[list(eos_ids)] = True
        self._here: list[int] = []  # Tokens of a path that the matcher has read beyond the answer
        self._over = False  # Whether the answer has left the grammar: it went on after its end
        self._masks: dict[Path, Tensor] = {}

    def reaches(self, path: Path) -> bool:
        """True if the grammar allows all tokens of a path; the matcher stands at its end then."""
        common = next((place for place, pair in enumerate(zip(self._here, path, strict=False)) if pair[0] != pair[1]),
                      min(len(self._here), len(path)))
        if common < len(self._here):
            self._matcher.rollback(len(self._here) - common)
            del self._here[common:]
        for token in path[common:]:
            if self._over or self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._here.append(token)
        return True

    def allowed(self, path: Path) -> Tensor:
        """True for the tokens that may follow a path, [V]; after an end the end tokens alone."""
        if path not in self._masks:
            found_V = self._ends_V
            if self.reaches(path) and not self._matcher.is_terminated():
                self._matcher.fill_next_token_bitmask(self._bits)
                bits = (self._bits[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
                found_V = bits.flatten()[: len(self._ends_V)].bool()
            self._masks[path] = found_V
        return self._masks[path]

    def forced(self, path: Path) -> Path:
        """Tokens of the text that must follow a path, or the one token that may; empty where there is a choice."""
        if not self.reaches(path) or self._matcher.is_terminated():
            return ()
        found = tuple(self._tokenizer.encode(self._matcher.find_jump_forward_string(), add_special_tokens=False))
        while found and not self.reaches((*path, *found[:MOST_FORCED])):
            # The end of the text may be another token with what follows it.
            found = found[: len(self._here) - len(path)]
        if not found and int(self.allowed(path).sum()) == 1:
            found = (int(self.allowed(path).byte().argmax()),)
        return found[:MOST_FORCED]

    def take(self, tokens: Path) -> None:
        """The answer has grown by some tokens."""
        self._over = not self.reaches(tokens)
        self._here, self._masks = [], {}


@dataclass
class RowRules:
    """The rules that decide the next token of a row on the host, and the text that the target has read of it."""

    text: list[int]
    before: list[Processor] = field(default_factory=list)  # Of logits before biases and the repetition penalty
    after: list[Processor] = field(default_factory=list)  # Of logits after these
    grammar: GrammarRow | None = None

    def apply(self, logits_V: Tensor, path: Path, processors: Sequence[Processor]) -> Tensor:
        """The logits after a path, changed by some of the processors."""
        scores_1V = logits_V[None].clone()
        if processors:
            text_1L = torch.tensor([[*self.text, *path]], device=logits_V.device)
            for one in processors:
                scores_1V = one(text_1L, scores_1V)
        return scores_1V[0]

    def take(self, tokens: Path) -> None:
        """The target has read some more tokens."""
        self.text += tokens
        if self.grammar is not None:
            self.grammar.take(tokens)


def paths_of(tree: TokenTree) -> list[list[Path]]:
    """The paths to all nodes of all rows."""
    found = []
    for tokens, parents in zip(tree.tokens_BN.tolist(), tree.parents_BN.tolist(), strict=True):
        paths: list[Path] = []
        for token, parent in zip(tokens, parents, strict=True):
            # Padding may name any parent.
            paths.append((*(paths[min(parent, len(paths) - 1)] if paths else ()), token))
        found.append(paths)
    return found


def constrained(tree: TokenTree, grammars: Sequence[GrammarRow | None]) -> TokenTree:
    """The trees without what the grammars of their rows forbid, and with what they force. Of a tree that was drawn the
    q of each node loses what is forbidden after it: leaving tokens out of draws without replacement leaves draws from
    the rest, in the same order, so that the tree is as exact as before. What is forced there stands below the root
    alone: it must not depend on draws."""
    forced: list[dict[Path, None]] = []
    for grammar, paths, real in zip(grammars, paths_of(tree), tree.real_BN.tolist(), strict=True):
        found: dict[Path, None] = {paths[0]: None}
        for node, path in enumerate(paths if tree.drawn is None else paths[:1]):
            # A node that is forced itself is followed by the rest of its text.
            if grammar is None or not real[node] or (node and path in found) or not (chain := grammar.forced(path)):
                continue
            whole = [(*path, *chain)[:size] for size in range(2, len(path) + len(chain) + 1)]
            found |= dict.fromkeys([one for one in whole if one not in found][: MOST_FORCED + 1 - len(found)])
        forced.append(found)
    if any(len(found) > 1 for found in forced):
        tree = joined(_planted(forced, tree), replace(tree, most_children=None))
    alive = [[grammar is None or (one and grammar.reaches(path)) for path, one in zip(paths, real, strict=True)]
             for grammar, paths, real in zip(grammars, paths_of(tree), tree.real_BN.tolist(), strict=True)]
    alive_BN = torch.tensor(alive, device=tree.real_BN.device)
    alive_BN[:, 0] = True
    if tree.drawn is not None:
        tree = replace(tree, drawn=_allowed_draws(tree, tree.drawn, grammars))
    return trimmed(replace(tree, real_BN=tree.real_BN & alive_BN))


def _planted(forced: Sequence[dict[Path, None]], tree: TokenTree) -> TokenTree:
    """Trees of given paths, parents first, in the place of guesses of the first drafter."""
    size = max(map(len, forced))
    rows = [[*found] for found in forced]
    tokens_BN = torch.tensor([[*(path[-1] for path in paths), *[0] * (size - len(paths))] for paths in rows])
    parents_BN = torch.tensor([[-1, *(paths.index(path[:-1]) for path in paths[1:]), *[0] * (size - len(paths))]
                               for paths in rows])
    real_BN = torch.arange(size) < torch.tensor([[len(paths)] for paths in rows])
    device = tree.tokens_BN.device
    planted = TokenTree.from_parents(tokens_BN.to(device), parents_BN.to(device), real_BN.to(device))
    return replace(planted, parts_BN=None if tree.parts_BN is None else torch.zeros_like(planted.tokens_BN))


def _allowed_draws(tree: TokenTree, drawn: Drawn, grammars: Sequence[GrammarRow | None]) -> Drawn:
    """The draws with a q for each node, in which what the grammar of the row forbids after it has no chance."""
    log_q_BNQ, inner_BN = spread(drawn.log_q_BIQ, drawn.inner_BN), drawn.inner_BN
    candidates_BNQ = None if drawn.candidates_BIQ is None else spread(drawn.candidates_BIQ, inner_BN)
    for row, (grammar, paths) in enumerate(zip(grammars, paths_of(tree), strict=True)):
        if grammar is not None:
            allowed_NV = torch.stack([grammar.allowed(path) for path in paths]).to(log_q_BNQ.device)
            ids_NQ = (torch.arange(log_q_BNQ.shape[-1], device=log_q_BNQ.device) if drawn.token_ids_Q is None
                      else drawn.token_ids_Q).expand(len(paths), -1)
            ids_NQ = ids_NQ if candidates_BNQ is None else candidates_BNQ[row]
            log_q_BNQ[row] = log_q_BNQ[row].masked_fill(~allowed_NV.gather(1, ids_NQ), -torch.inf)
    nodes_N = torch.arange(tree.size, device=inner_BN.device)
    return replace(drawn, log_q_BIQ=log_q_BNQ, inner_BN=nodes_N.expand_as(inner_BN), candidates_BIQ=candidates_BNQ)
