"""Chat templates of the kinds that occur in the wild, on a byte-level tokenizer whose tokens merge."""

from functools import cache
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end_header|>", "<|eot|>", "[INST]",
           "[/INST]", "<start_of_turn>", "<end_of_turn>")
CORPUS = ("the assistant and the user talk about the weather in the town and the price of bread\n\n",
          "hello there, how are you? I am fine. user\nassistant\nmodel\n\n", "1 2 3 4 10 100 <think>\n\n</think>\n\n")

LLAMA3_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 cuts text before merging (without its English contractions): line breaks stay together."""
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
           "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}")
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}")
"""Like Qwen3's: the thoughts of earlier turns are stripped."""


@cache
def trained() -> Any:
    """Byte-level BPE in which spaces, line breaks and common words merge."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def merging_tokenizer(template: str | None, *, eos: str = "<eos>", pad: str = "<pad>") -> Any:
    """The trained tokenizer with a chat template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=trained(), bos_token="<bos>", eos_token=eos, pad_token=pad,
        additional_special_tokens=[name for name in SPECIAL if name not in (eos, pad, "<bos>")],
        clean_up_tokenization_spaces=False)
    fast.chat_template = template
    return fast
