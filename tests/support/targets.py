"""Random targets of other shapes than the shared one, and adapters for them."""

import torch
from draftsmith.modules import Adapter, Target
from draftsmith.modules.target.adapter import LowRank, choose_layers, linear_layers
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.architectures import random_model


def random_target(layers: int, **gemma: float) -> Target:
    """A random model with more layers than the shared one: a Llama, or a Gemma 2 with these settings."""
    model = random_model("Gemma2" if gemma else "Llama", num_hidden_layers=layers, max_position_embeddings=256, **gemma)
    return Target(model.double(), tiny_tokenizer(), name="random")


def tied_target() -> Target:
    """A tiny target whose output layer is its embedding."""
    with torch.random.fork_rng(devices=[]):
        model = random_model("Llama", num_hidden_layers=2, max_position_embeddings=2048, tie_word_embeddings=True)
    return Target(model, tiny_tokenizer(), name="tiny-tied")


def templated_target(source: str | None) -> Target:
    """The tiny target with another chat template; with None a base model."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = source
    return Target(tiny_model(), tokenizer, name="templated")


def with_broken(*tokens: int, eos: int | None = None) -> Target:
    """The tiny target with NaN embeddings."""
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[list(tokens)] = torch.nan
    if eos is not None:
        model.generation_config.eos_token_id = eos
    return Target(model, tiny_tokenizer(), name="broken")


def random_adapter(target: Target, modules: tuple[str, ...] = (), rank: int = 3, size: float = 0.2) -> Adapter:
    """An adapter that changes a lot."""
    generator = torch.Generator().manual_seed(1)
    linears = linear_layers(target.model)
    return Adapter({name: LowRank(a_RI=size * torch.randn(rank, linears[name].in_features, generator=generator),
                                  b_OR=size * torch.randn(linears[name].out_features, rank, generator=generator))
                    for name in choose_layers(target.model, modules, without=target.head)}, 0.7)


def six_layers(rows: int = 100) -> Target:
    """A random Llama of six layers, so that three can be tapped, as wide as `tiny_target` and with its tokenizer."""
    return Target(random_model("Llama", vocab_size=rows, num_hidden_layers=6, max_position_embeddings=2048,
                               initializer_range=0.02, tie_word_embeddings=False), tiny_tokenizer(), name="tiny-target")
