"""Random targets of other shapes than the shared one, and adapters for them."""

from typing import Any

import torch
from draftsmith.modules import Adapter, Target
from draftsmith.modules.target.adapter import LowRank, choose_layers, linear_layers
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


def random_target(layers: int, **gemma: float) -> Target:
    """A random model with more layers than the shared one: a Llama, or a Gemma 2 with these settings."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    config_class, model_class = (Gemma2Config, Gemma2ForCausalLM) if gemma else (LlamaConfig, LlamaForCausalLM)
    config = config_class(vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64,
                          num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                          max_position_embeddings=256, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
                          eos_token_id=2, **gemma)
    torch.manual_seed(1)
    return Target(model_class(config).double().eval(), tiny_tokenizer(), name="random")


def tied_target() -> Target:
    """A tiny target whose output layer is its embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3,
            pad_token_id=0, bos_token_id=1, eos_token_id=2))
    return Target(model, tiny_tokenizer(), name="tiny-tied")


def random_adapter(target: Target, modules: tuple[str, ...] = (), rank: int = 3, size: float = 0.2) -> Adapter:
    """An adapter that changes a lot."""
    generator = torch.Generator().manual_seed(1)
    linears = linear_layers(target.model)
    return Adapter({name: LowRank(a_RI=size * torch.randn(rank, linears[name].in_features, generator=generator),
                                  b_OR=size * torch.randn(linears[name].out_features, rank, generator=generator))
                    for name in choose_layers(target.model, modules, without=target.head)}, 0.7)


def six_layers(rows: int = 100) -> Target:
    """A random Llama of six layers, so that three can be tapped, as wide as `tiny_target` and with its tokenizer."""
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(LlamaConfig(
        vocab_size=rows, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
        tiny_tokenizer(), name="tiny-target")
