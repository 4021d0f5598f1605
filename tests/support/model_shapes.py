"""Models of a stated shape with random weights that need no file, and whose greedy text is known: for measurements.

Each token determines the next one by a wide margin, whatever came before: rounding, batches and trees then change no
answer, as they would change that of usual random weights, whose logits are nearly equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from draftsmith.modules import Target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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


def _llama(vocab_size: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocab_size, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
                       num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=16384,
                       rms_norm_eps=1e-5, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def _qwen3(vocab_size: int, width: int, inner: int, layers: int, heads: int, kv_heads: int) -> Qwen3Config:
    # The original's output layer is its embedding. Untied it is read just as often, and can say what comes next.
    return Qwen3Config(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, max_position_embeddings=16384,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)


SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(lambda: _llama(128256, 4096, 14336, 32, 32, 8), LlamaForCausalLM, 32000, torch.bfloat16),
    "qwen3-0.6b": Shape(lambda: _qwen3(151936, 1024, 3072, 28, 16, 8), Qwen3ForCausalLM, 32000, torch.bfloat16),
    "smollm2-135m": Shape(lambda: _llama(49152, 576, 1536, 30, 9, 3), LlamaForCausalLM, 4096, torch.float32),
    "tiny": Shape(lambda: _llama(512, 64, 128, 4, 4, 2), LlamaForCausalLM, 128, torch.float32),
}
"""By name: a target of recipes for 8B models, a small one, the embedded model, and one for trying a measurement."""


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
