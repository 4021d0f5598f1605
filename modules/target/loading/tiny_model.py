"""A random model of a few thousand weights with a character tokenizer and a chat template, for tests and trial runs."""

import string
from typing import Any

import torch

TINY_NAME = "tiny-random"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
"""The ChatML template, without a default system prompt."""
_SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]


def tiny_tokenizer() -> Any:
    """A fast tokenizer with one token a printable character, ChatML, and `<|im_end|>` as its end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set(string.ascii_letters + string.digits + string.punctuation + " \n"))
    vocabulary = {token: index for index, token in enumerate(_SPECIAL + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random Llama: 2 layers, width 32, grouped-query attention, one output row a token of `tiny_tokenizer`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         initializer_range=0.3, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
                         eos_token_id=2)
    # Weights must not depend on, nor disturb, the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()
