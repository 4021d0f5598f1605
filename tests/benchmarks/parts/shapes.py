"""Targets of a stated shape with random weights whose text is known, drafters of the recipes for 8B models that fit
them, and a proposer of stated acceptance: for measurements.

Each token determines the next one by a wide margin, whatever came before: rounding, batches and trees then change no
answer, as they would change that of usual random weights, whose logits are nearly equal.

Shapes: B rows, F nodes, H depths, Q entries of the draft vocabulary, S texts, T places of a text, R ranks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from draftsmith.modules import DraftState, Frontier, Observation, Proposer, Scores, Target
from draftsmith.modules.interfaces.proposer import VerifiedRows
from draftsmith.modules.row_buffers import RowBuffer
from draftsmith.modules.target.draft_vocabulary import draft_index
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.recipe import Recipe
from draftsmith.trainers import DraftModule
from support.drafters import Wrapped, WrappedState
from torch import Tensor
from torch.nn import functional
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PROMPTS = Path(__file__).resolve().parents[3] / "recipes" / "handwritten.jsonl"
STRIDE = 7  # A token t is followed by t + STRIDE, counted around the end of the written tokens
_EMBEDDED, _MARGIN = 20.0, 20.0
"""Size of the components of an embedding, so that 32 layers add little to it; the logit of the next token."""
_FIRST_CHARACTER = 0x20000
"""Code point of the first character that stands for a token beyond those of the tiny tokenizer."""


@dataclass(frozen=True)
class Shape:
    """A model by its configuration, and the recipes' draft vocabulary that it has room for."""

    config: Callable[[], Any]
    model: Callable[[Any], Any]
    written: int  # Tokens that the model writes, those with the lowest ids: a reduced draft vocabulary may be these
    dtype: torch.dtype


def _config(kind: Any, vocab_size: int, width: int, inner: int, layers: int, heads: int, kv_heads: int,
            **more: Any) -> Any:
    # The output layer of Qwen3-0.6B is its embedding. Untied it is read just as often, and can say what comes next.
    return kind(vocab_size=vocab_size, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=16384,
                tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(partial(_config, LlamaConfig, 128256, 4096, 14336, 32, 32, 8, rms_norm_eps=1e-5),
                          LlamaForCausalLM, 32000, torch.bfloat16),
    "qwen3-0.6b": Shape(partial(_config, Qwen3Config, 151936, 1024, 3072, 28, 16, 8, head_dim=128),
                        Qwen3ForCausalLM, 32000, torch.bfloat16),
    "smollm2-135m": Shape(partial(_config, LlamaConfig, 49152, 576, 1536, 30, 9, 3, rms_norm_eps=1e-5),
                          LlamaForCausalLM, 4096, torch.float32),
    "qwen3.5-9b": Shape(partial(_config, Qwen3_5TextConfig, 248320, 4096, 12288, 32, 16, 4, head_dim=256),
                        Qwen3_5ForCausalLM, 32000, torch.bfloat16),
    "lfm2-1.2b": Shape(partial(_config, Lfm2Config, 65536, 2048, 12288, 16, 32, 8,
                               layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv"
                                            for layer in range(16)]),
                       Lfm2ForCausalLM, 32000, torch.bfloat16),
    "tiny": Shape(partial(_config, LlamaConfig, 512, 64, 128, 4, 4, 2, rms_norm_eps=1e-5),
                  LlamaForCausalLM, 128, torch.float32),
    "tiny-hybrid": Shape(partial(_config, Qwen3_5TextConfig, 512, 64, 128, 4, 4, 2, head_dim=16, linear_num_key_heads=2,
                                 linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16),
                         Qwen3_5ForCausalLM, 128, torch.float32),
}
"""By name: a target of recipes for 8B models, a small one, the embedded model, two with recurrent layers, and two for
trying a measurement."""


def shaped_target(name: str, device: str = "cpu", pack: int = 1) -> Target:
    """A target of a shape, its weights made on the device; on a CPU with packed linear layers, or for `pack` 0 without,
    so that its layers can be compiled."""
    shape = SHAPES[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            model = shape.model(shape.config()).eval()
            _determine(model, shape.written)
    finally:
        torch.set_default_dtype(before)
    return Target(model, shaped_tokenizer(model.config.vocab_size), name=name, pack=pack)


@torch.no_grad()
def _determine(model: Any, written: int) -> None:
    """Let the output layer find the token after each of the written ones in what its embedding leaves in the states."""
    embedding_VD, output_VD = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding_VD.normal_(std=_EMBEDDED)
    former_W = (torch.arange(written, device=embedding_VD.device) - STRIDE) % written
    output_VD[:written] = functional.normalize(embedding_VD[:written].float(), dim=-1)[former_W].to(output_VD.dtype)
    output_VD[:written] *= _MARGIN / embedding_VD.shape[1] ** 0.5
    output_VD[written:] = 0


def shaped_tokenizer(vocab_size: int) -> Any:
    """The tiny tokenizer with one more character for each further token."""
    tokenizer = tiny_tokenizer()
    known = len(tokenizer)
    tokenizer.add_tokens([chr(_FIRST_CHARACTER + number) for number in range(vocab_size - known)])
    return tokenizer


def shaped_prompt(name: str, row: int, length: int) -> tuple[int, ...]:
    """A prompt of written tokens that no other row shares and that repeats nothing."""
    written = SHAPES[name].written
    return tuple((11 + 3 * row + STRIDE * place) % written for place in range(length))


def chat_prompts(target: Target, count: int, longest: int) -> list[tuple[int, ...]]:
    """The first turns of the handwritten prompts under the target's chat template, one of each category in turn."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows[:: max(1, len(rows) // count)]:
        text = target.tokenizer.apply_chat_template([{"role": "user", "content": row["turns"][0]}], tokenize=False,
                                                    add_generation_prompt=True)
        tokens = tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) <= longest:
            found.append(tokens)
    return found[:count]


RECIPES = ("eagle3", "medusa", "dspark", "hydra", "eagle", "falcon", "kangaroo", "prompt_tokens", "hidden_transfer",
           "fastdraft")
"""One recipe for each family of drafters that leaves the target as it is; a short measurement takes the first four."""


def shaped_recipe(name: str, shape: str, *words: str) -> Recipe:
    """A shipped recipe whose drafter fits the shape: draft vocabulary, layers and insertion points of the text."""
    layers, written = SHAPES[shape].config().num_hidden_layers, SHAPES[shape].written
    pair = ["--config", name, "--config", "eight_billion", "--out", "runs/shaped"]
    given = COMMANDS["run"].parse(pair).values.train.drafter
    fitting = {
        "vocabulary_size": min(given.vocabulary_size or written, written) if given.vocabulary_size else None,
        "layers": f"[0,1,{layers - 2},{layers - 1}]" if getattr(given, "layers", None) else None,
        "taps": f"{[*range(min(len(given.taps), layers))]}" if getattr(given, "taps", None) else None,
        "layer": 3 * layers // 4 if hasattr(given, "layer") else None,
        "mask_token_id": written - 1 if getattr(given, "mask_token_id", None) is not None else None,
        "insertions": min(given.insertions, written // 16) if hasattr(given, "insertions") else None,
    }
    options = [word for key, value in fitting.items() if value is not None for word in (f"--drafter.{key}", str(value))]
    recipe: Recipe = COMMANDS["run"].parse([*pair, *options, *words]).values
    return recipe


def shaped_module(recipe: Recipe, target: Target, shape: str) -> DraftModule:
    """The training module of a recipe with its drafter, whose reduced vocabulary are the tokens the target writes."""
    counts = torch.zeros(target.vocab_size)
    counts[: SHAPES[shape].written] = 1.0
    module = recipe.module(target, counts)
    module.configure_model()
    return module


RANKS = 8  # Guesses after a node of which one may be right
_NO_GUESS = -40.0  # Log-probability of all others


class OracleState(WrappedState):
    """The drafter's own state, and the place of each row in its text."""

    def __init__(self, inner: DraftState, rows: int, device: torch.device) -> None:
        super().__init__(inner)
        self.texts, self.places = (RowBuffer(rows, device=device, dtype=torch.long) for _ in range(2))
        """Number of each row's text; tokens of it that the target has read."""
        self.texts.values.copy_(torch.arange(rows))
        self.held = (inner, self.places)
        self.asked = 0  # Depths of the growing tree that were scored

    def drop_tree(self) -> None:
        super().drop_tree()
        self.asked = 0

    def keep(self, rows_R: Tensor) -> None:
        super().keep(rows_R)
        if len(rows_R):
            self.texts.keep(rows_R)
        else:
            # Emptied for another call, whose row r decodes text r again.
            self.texts.values.copy_(torch.arange(len(self.texts.values)))


class Oracle(Wrapped):
    """A drafter's work with guesses of stated acceptance: the guess of rank r is right with chance a (1 - a)^r.

    Row r decodes text r: give as many requests as rows, in the order of the texts. Trees must grow level by level."""

    def __init__(self, inner: Proposer, texts_ST: Tensor, vocab_size: int, acceptance: float) -> None:
        super().__init__(inner)
        self.texts_ST, self.vocab_size = texts_ST, vocab_size
        self._index_V: Tensor | None = None
        ranks_R = torch.arange(RANKS, device=texts_ST.device)
        self.chances_R = acceptance * (1 - acceptance) ** ranks_R
        generator = torch.Generator().manual_seed(0)
        drawn_ST = torch.rand(texts_ST.shape, generator=generator).to(texts_ST.device)
        self.ranks_ST = torch.searchsorted(self.chances_R.cumsum(0), drawn_ST)
        """Rank of the right token among the guesses at each place; RANKS where it is not among them."""

    def state_of(self, state: DraftState) -> DraftState:
        return _oracle_state(state).inner

    def start(self, rows: int, capacity: int, verified: VerifiedRows | None = None) -> OracleState:
        return OracleState(super().start(rows, capacity, verified), rows, self.texts_ST.device)

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        held = _oracle_state(state)
        super().observe(state, rows_R, observation)
        held.places.values.index_add_(0, rows_R, observation.counts_B)

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        held = _oracle_state(state)
        scores = super().expand(state, frontier)
        depths = scores.log_probs_BFHQ.shape[2]
        held.asked += depths
        rows = len(frontier.nodes_BF)
        ahead_H = torch.arange(held.asked - depths + 1, held.asked + 1, device=self.texts_ST.device)
        places_BH = (held.places.values[:rows, None] + ahead_H).clamp(max=self.texts_ST.shape[1] - 1)
        texts_B1 = held.texts.values[:rows, None]
        right_BH, ranks_BH = self.texts_ST[texts_B1, places_BH], self.ranks_ST[texts_B1, places_BH]
        return self._replaced(scores, right_BH, ranks_BH)

    def _replaced(self, scores: Scores, right_BH: Tensor, ranks_BH: Tensor) -> Scores:
        """The scores with the right token in its rank, and tokens after it in the others."""
        log_BFHQ = torch.full_like(scores.log_probs_BFHQ, _NO_GUESS)
        size, ids_Q = log_BFHQ.shape[-1], scores.token_ids_Q
        if ids_Q is not None:
            if self._index_V is None:
                self._index_V = draft_index(ids_Q, self.vocab_size)
            right_BH = self._index_V[right_BH]
        # A right token without an entry is in no rank.
        ranks_BH = torch.where(right_BH < 0, RANKS, ranks_BH)
        order_R = torch.arange(RANKS, device=right_BH.device)
        wrong_BHR = (right_BH.clamp(min=0)[..., None] + 1 + order_R) % size
        entries_BHR = torch.where(order_R == ranks_BH[..., None], right_BH[..., None], wrong_BHR)
        entries_BFHR = entries_BHR[:, None].expand(-1, log_BFHQ.shape[1], -1, -1)
        log_BFHQ.scatter_(3, entries_BFHR, self.chances_R.log().to(log_BFHQ.dtype).expand_as(entries_BFHR))
        return Scores(log_probs_BFHQ=log_BFHQ, token_ids_Q=ids_Q, states_BFHD=scores.states_BFHD)


def _oracle_state(state: DraftState) -> OracleState:
    if not isinstance(state, OracleState):
        raise TypeError(f"an oracle needs the state that its own start() made, got {type(state).__name__}")
    return state
