"""Targets that cannot be used: encoders, broken tokenizers, chat templates that fail."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.faults import Fault, Place, check, ids
from support.tiers import some_long

TEMPLATES = {
    "divides by zero": "{{ 1 // 0 }}", "divides by a length": "{{ 1 / (messages | length - 1) }}",
    "calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "does not end": "{% if true %}",
    "adds text and number": "{{ 'a' + 1 }}", "takes an entry that is not there": "{{ messages[3].content }}",
    "refuses": "{{ raise_exception('no users here') }}", "calls a text": "{{ 'a'() }}", "has no filter": "{{ 1 | x }}",
    "imports": "{% include 'other' %}", "has a bad format": "{{ '%d' % 'a' }}",
    "compares": "{{ 'a' < 1 }}", "reaches for a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32,
         "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: list[tuple[str, Any, str]] = [
    ("BERT", {"model_type": "bert", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 4}, "is an encoder, .* Choose a decoder-only target"),
    ("T5", {"model_type": "t5", "vocab_size": 100, "d_model": 32, "num_layers": 1}, "could not be loaded .*set target"),
    ("ViT", {"model_type": "vit", "hidden_size": 32}, "could not be loaded .*set target.name"),
    ("no type", {}, "could not be loaded .*set target.name"),
    ("an unknown type", {"model_type": "nonsense"}, "could not be loaded .*set target.name"),
    ("a list", [], "could not be loaded .*set target.name"),
    ("null", None, "could not be loaded .*set target.name"),
    ("layers of text", {**LLAMA, "num_hidden_layers": "two"}, "could not be loaded .*set target.name"),
    ("a width that heads do not divide", {**LLAMA, "hidden_size": 33}, "could not be loaded|Choose another"),
    ("no heads", {**LLAMA, "num_attention_heads": 0}, "could not be loaded .*set target.name"),
    ("a negative width", {**LLAMA, "hidden_size": -32}, "could not be loaded .*set target.name"),
    ("an unknown activation", {**LLAMA, "hidden_act": "none"}, "could not be loaded .*set target.name"),
    ("rotary settings of text", {**LLAMA, "rope_scaling": "x"}, "could not be loaded .*set target.name"),
]
TOKENIZERS = {"cut short": "{", "empty": "", "an empty object": "{}", "a list": "[]", "null": "null",
              "of another kind": '{"version": "1.0", "model": {"type": "nonsense"}}', "bytes": b"\xff\xfe"}


def model(place: Place, config: Any, tokenizer: str | bytes = "") -> None:
    """Write a folder of a model without weights."""
    place.write("m/config.json", json.dumps(config))
    place.write("m/tokenizer.json", tokenizer)


def with_config(config: Any) -> Callable[[Place], None]:
    """A preparation that writes a model's folder with a config."""
    return lambda place: model(place, config)


def with_tokenizer(tokenizer: str | bytes) -> Callable[[Place], None]:
    """A preparation that writes a model's folder with a tokenizer."""
    return lambda place: model(place, LLAMA, tokenizer)


def with_template(source: str) -> Callable[[Place], None]:
    """A preparation that writes a chat template."""
    return lambda place: place.write("t.jinja", source) and None


GENERATE = "generate --artifact {artifact} --prompt hi --max_new_tokens 1"
FAULTS = [
    *(Fault(f"a chat template {name}", f"{GENERATE} --target.chat_template t.jinja",
            r"chat template fails: .*; change the messages, or set target\.chat_template", with_template(source))
      for name, source in TEMPLATES.items()),
    *(Fault(f"a config of {name}", "plan --config {tiny} --target.name m", says, with_config(config))
      for name, config, says in CONFIGS),
    *(Fault(f"a tokenizer {name}", f"{GENERATE} --target.name m", "could not be loaded .*set target.name",
            with_tokenizer(content)) for name, content in TOKENIZERS.items()),
    Fault("devices that are not here", "run --config {tiny} --out o --train.accelerator gpu",
          r"train\.accelerator 'gpu'.* cannot train here .*; set train\.accelerator: auto", leaves=("o/*",)),
    Fault("a strategy that does not exist", "run --config {tiny} --out o --train.strategy fast",
          r"train\.strategy must be one of auto, ddp, .*, got 'fast'"),
]


@pytest.mark.parametrize("fault", some_long(FAULTS, 2), ids=ids(FAULTS))
def test_a_target_that_cannot_be_used_is_refused_in_one_sentence(fault: Fault, place: Place) -> None:
    check(fault, place)
