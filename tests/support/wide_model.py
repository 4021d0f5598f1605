"""A random model folder whose activations outweigh its weights."""

from pathlib import Path

import torch
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


def wide_model(folder: Path) -> Path:
    """Write a model of two wide layers with random weights, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=384, intermediate_size=768, num_hidden_layers=2,
                                 num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048,
                                 pad_token_id=0, bos_token_id=1, eos_token_id=2)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
