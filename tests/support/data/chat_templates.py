"""Chat templates of the shapes that published models have, on byte-level tokenizers that merge."""

from functools import cache
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end_header|>", "<|eot|>", "[INST]",
           "[/INST]", "<start_of_turn>", "<end_of_turn>")
CORPUS = ("the assistant and the user talk about the weather in the town and the price of bread\n\n",
          "hello there, how are you? I am fine. user\nassistant\nmodel\n\n", "1 2 3 4 10 100 <think>\n\n</think>\n\n")

LLAMA3_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 cuts text before merging (without its English contractions): line breaks stay together."""
MIXTRAL = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
           "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}")
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}")
"""Like Qwen3's: the thoughts of earlier turns are stripped."""


TOKENS = ("<pad>", "<s>", "</s>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|bot|>", "<|head|>",
          "<|/head|>", "<|eot|>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]",
          "<turn>", "</turn>", "<｜User｜>", "<｜Assistant｜>", "<｜end｜>", "[gMASK]", "<|user|>", "<|assistant|>",
          "<|observation|>", "<|system|>", "<|end|>", "<|role|>", "<|/role|>", "<|text_end|>", "<N10>", "<N11>",
          "<N12>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>")
"""Special tokens."""
PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # Added tokens that decoding shows
SYSTEM = "{% if m.role == 'system' %}"
ASSISTANT = "{% elif m.role == 'assistant' %}"

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
ANSWERS_CLOSED = CHATML.replace("<|im_end|>", "{{ '</tool_call>' if m.role == 'assistant' else '' }}<|im_end|>")
CHATML_CALLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LLAMA2 = ("{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[[INST]] {{ m.content | trim }} [[/INST]]"
          "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}")
LLAMA3 = ("{{ bos_token }}{% if not date_string is defined %}{% set date_string = '1 Jan 2030' %}{% endif %}"
          "<|head|>system<|/head|>\n\nToday: {{ date_string }}\n\n<|eot|>"
          "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
          "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}")
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 >= messages | length - 2 %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULTS]{{ m.content }}[/RESULTS]"
    "{% elif m.tool_calls %}[CALLS][{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}, \"id\": \"{{ c.id }}\"}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}")
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}")
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n"
    "{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{{ m.content.lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}")
QWEN3_THINKING = QWEN3.partition("{% if enable_thinking")[0] + "<think>\n{% endif %}"
R1 = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
      "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}")
R1_FIRST = R1.replace("<｜Assistant｜><think>\n", "<｜Assistant｜>")
V31 = ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
       "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
       "{% else %}<｜Assistant｜></think>{{ m.content.split('</think>')[-1] }}<｜end｜>{% endif %}{% endfor %}"
       "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}")
GLM = (
    "[gMASK]{% set quiet = enable_thinking is defined and not enable_thinking %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{{ '/nothink' if quiet else '' }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|assistant|>{{ '\n' }}{% if loop.last and m.reasoning_content %}<think>"
    "{{ m.reasoning_content.strip() }}</think>{% else %}<think></think>{% endif %}"
    "{% if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}\n{{ c.function.arguments | tojson }}\n"
    "</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if quiet %}{{ '\n' }}<think></think>{% endif %}{% endif %}")
GRANITE = ("<|role|>system<|/role|>Today is {{ strftime_now('%B %d, %Y') }}."
           "{% if thinking %} Think first.{% endif %}<|text_end|>\n{% for m in messages %}"
           "<|role|>{{ m.role }}<|/role|>{{ m.content }}<|text_end|>\n{% endfor %}"
           "{% if add_generation_prompt %}<|role|>assistant<|/role|>{% endif %}")
NEMOTRON = ("{{ '<N10>System\n\n' }}{% for m in messages %}{% if m.role == 'user' %}<N11>User\n{{ m.content }}\n"
            "{% else %}<N11>Assistant\n{{ m.content.split('</think>')[-1].strip() }}\n<N12>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<N11>Assistant\n{% if enable_thinking is defined and not enable_thinking %}"
            "<think></think>{% else %}<think>\n{% endif %}{% endif %}")
HARMONY = ("{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
           "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
           "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
           "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
PHI3 = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}")
VICUNA = ("A chat. {% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
          "{% else %}ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
TEXTUAL = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKED = ("{% for m in messages %}<turn>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
          "{% endgeneration %}{% else %}{{ m.content }}{% endif %}</turn>\n{% endfor %}"
          "{% if add_generation_prompt %}<turn>assistant\n{% endif %}")
ENDLESS = R1.replace("<｜end｜>", "")
NEVER = R1.replace("<think>\n{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
SHOUTING = CHATML.replace("m.content", "(m.content | upper if m.role == 'assistant' else m.content)")
REWRITING = CHATML.replace("{{ m.content }}", "{{ messages | length }} {{ m.content }}")


@cache
def backend(special: tuple[str, ...], size: int) -> Any:
    """Byte-level BPE in which spaces, line breaks and common words merge."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if special is TOKENS:
        tokenizer.add_tokens([AddedToken(name, normalized=False) for name in PLAIN_TOKENS])
    return tokenizer


def merging_tokenizer(template: str | None, *, eos: str = "<eos>", pad: str = "<pad>") -> Any:
    """A tokenizer with few special tokens and a chat template."""
    others = [name for name in SPECIAL if name not in (eos, pad, "<bos>")]
    return _with_template(template, backend(SPECIAL, 400), bos_token="<bos>", eos_token=eos, pad_token=pad,
                          additional_special_tokens=others)


def shaped_tokenizer(template: str | None, *, eos: str = "<eos>") -> Any:
    """The tokenizer with the special tokens of all shapes and a chat template."""
    return _with_template(template, backend(TOKENS, 420), bos_token="<s>", eos_token=eos, pad_token="<pad>")


def _with_template(template: str | None, merging: Any, **tokens: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=merging, clean_up_tokenization_spaces=False, **tokens)
    fast.chat_template = template
    return fast
