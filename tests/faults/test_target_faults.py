"""Targets that cannot be used: folders that bring code, claim other sizes than their weights have, or are named by an
artifact; encoders, broken tokenizers, chat templates that fail."""

import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.__main__ import main
from safetensors.torch import load_file, save_file
from support.faults import Fault, Place, check, edited, ids, written
from support.tiers import some_long

PLAN = "plan --config {tiny} --out out --target.name ./model"
DISTILL = "distill --config {tiny} --out out --target.name ./model"
GENERATE = "generate --prompt hi --artifact {artifact}"
SHORT = f"{GENERATE} --max_new_tokens 1"
TOKENIZER = json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_code.T", None]}})
CODE = ("from transformers import LlamaConfig, LlamaForCausalLM\nopen('ran', 'w')\n"
        "class C(LlamaConfig):\n    model_type = 'own'\nclass M(LlamaForCausalLM):\n    config_class = C\n")
"""Code of a model, which leaves a file when it runs."""
AUTO_MAP = {"AutoConfig": "own_code.C", "AutoModelForCausalLM": "own_code.M"}  # The entry of config.json that names it
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


@cache
def tiny_files() -> dict[str, bytes]:
    """The files of the tiny random model in the layout of Hugging Face."""
    with TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def write_model(place: Place, files: dict[str, str | bytes] | None = None, **changes: Any) -> Path:
    """Write the folder `model` of a case."""
    for name, content in {**tiny_files(), **(files or {})}.items():
        place.write(f"model/{name}", content)
    config = json.loads(tiny_files()["config.json"]) | changes
    if "config.json" not in (files or {}):
        place.write("model/config.json", json.dumps(config))
    return place.folder / "model"


def model(files: dict[str, str | bytes] | None = None, **changes: Any) -> Callable[[Place], Path]:
    """A preparation that writes the folder."""
    return lambda place: write_model(place, files, **changes)


def with_code(**changes: Any) -> Callable[[Place], Path]:
    """A preparation that writes a folder with code of its own."""
    return model({"own_code.py": CODE}, auto_map=AUTO_MAP, **changes)


def targets(name: str, **changes: object) -> Callable[[Place], object]:
    """A preparation that changes the target that the artifact names."""
    change = edited(lambda content: content["target"].update(name=name, **changes))
    return lambda place: (change(place), write_model(place) if name.endswith("model") else None)


def bare(config: Any, tokenizer: str | bytes = "") -> Callable[[Place], object]:
    """A preparation that writes the folder of a model without weights."""
    return lambda place: (place.write("m/config.json", json.dumps(config)), place.write("m/tokenizer.json", tokenizer))


def lacking_output(place: Place) -> None:
    """Write a folder whose weights lack one tensor."""
    file = write_model(place) / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def piped(place: Place) -> None:
    """Write a folder whose weights are a pipe that nobody writes to."""
    file = write_model(place) / "model.safetensors"
    file.unlink()
    os.mkfifo(file)


FAULTS = [
    Fault("a plan for a target with code", PLAN, r"'\./model' brings code of its own .* --target\.trust_remote_code",
          with_code(model_type="own")),
    Fault("distillation by a target with code", DISTILL, r"brings code of its own .* --target\.trust_remote_code true",
          with_code(model_type="own"), leaves=("out/*",)),
    Fault("a tokenizer with code", GENERATE + " --target.name ./model", r"brings code of its own",
          model({"own_code.py": CODE, "tokenizer_config.json": TOKENIZER})),
    Fault("code that a recipe asks for", "plan --config r.yaml",
          r"target\.trust_remote_code lets code of others run.*add --target\.trust_remote_code true to the command",
          lambda place: (with_code(model_type="own")(place), place.write(
              "r.yaml", "extends: tiny\nout: out\ntarget:\n  name: ./model\n  trust_remote_code: true\n"))),
    Fault("code that an artifact would choose", GENERATE + " --target.trust_remote_code true",
          r"runs the code of a target that you name.* add --target\.name org/model", targets("org/model")),
    Fault("an artifact of a folder", GENERATE, r"made for the model in the folder or file \./model.* --target\.name F",
          targets("./model")),
    Fault("an artifact of an absolute folder", GENERATE, r"/else/where, which is loaded only if you name it",
          targets("/else/where")),
    Fault("an artifact of a folder with a hub's name", GENERATE, r"folder or file model, which is loaded only if",
          targets("model")),
    Fault("an artifact of a GGUF file", "export --format medusa --out e --artifact {artifact}",
          r"folder or file weights\.gguf.* --target\.name", targets("weights.gguf")),
    Fault("an evaluation with a folder of the artifact's choice", "evaluate --out e --artifact {artifact}",
          r"which is loaded only if you name it; give --target\.name FOLDER", targets("../model")),
    Fault("a folder with an adapter of another model", PLAN, r"adapter_config\.json.* names another model.* merge",
          model({"adapter_config.json": '{"base_model_name_or_path": "/else/where", "peft_type": "LORA"}'})),
    *(Fault(f"{command}, an adapter that is none", f"{command} --config {{tiny}} --out out --target.adapter ./a",
            r"target\.adapter \./a holds no adapter_config\.json; give a folder that save_pretrained of peft wrote",
            written("a/adapter_model.safetensors", b"")) for command in ("plan", "distill", "run")),
    *(Fault(f"a GGUF file {name}", "plan --config {tiny} --out out --target.name ./m.gguf",
            r"the target '\./m\.gguf' could not be loaded \(.*set target\.name to", written("m.gguf", content))
      for name, content in (
          ("of four bytes", b"GGUF"), ("cut in its header", b"GGUF\x03\0\0\0\x01"),
          ("cut in a key", b"GGUF\x03\0\0\0" + struct.pack("<QQQ", 1, 1, 20) + b"general"),
          ("with a key longer than itself", b"GGUF\x03\0\0\0" + struct.pack("<QQQ", 1, 1, 2**40) + b"general"),
          ("with more keys than bytes", b"GGUF\x03\0\0\0" + struct.pack("<QQ", 1, 2**60)),
          ("of another kind", b"{}"), ("without content", b""))),
    Fault("a billion layers", PLAN, r"num_hidden_layers 1000000000, more than any model \(10,000\); correct",
          model(num_hidden_layers=10**9)),
    Fault("more layers than tensors", PLAN, r"9,999 layers, but its weights hold 21 tensors; correct it",
          model(num_hidden_layers=9999)),
    Fault("a billion words", PLAN, r"vocab_size 1000000000, more than any model \(67,108,864\)",
          model(vocab_size=10**9)),
    Fault("a wide embedding", PLAN, r"makes 4,294,985,888 parameters, but its weights have [\d,]+ bytes; correct it",
          model(vocab_size=2**26)),
    Fault("a wide model", DISTILL, r"makes [\d,]+ parameters, but its weights have [\d,]+ bytes",
          model(hidden_size=2**20), leaves=("out/*",)),
    Fault("a billion experts", PLAN, r"num_local_experts 1000000000, more than any model",
          model(model_type="mixtral", num_local_experts=10**9)),
    Fault("a billion layers inside", PLAN, r"num_hidden_layers 1000000000, more than any model",
          model(text_config={"num_hidden_layers": 10**9})),
    Fault("a draft's folder of a billion layers",
          "plan --config {tiny} --out out --family draft_lm --drafter.folder ./model --train.objective hard",
          r"num_hidden_layers 1000000000, more than any model", model(num_hidden_layers=10**9)),
    Fault("a configuration nested deeply", PLAN, r"'\./model' could not be loaded .*set target\.name",
          model({"config.json": "[" * 100_000})),
    Fault("a configuration of many digits", PLAN, r"'\./model' could not be loaded .*set target\.name",
          model({"config.json": '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}"})),
    Fault("weights without an output layer", DISTILL, r"weights of the target '\./model' lack lm_head\.weight, which",
          lacking_output, leaves=("out/*",)),
    Fault("weights that are a pipe", GENERATE + " --target.name ./model", r"model\.safetensors is no ordinary file",
          piped),
    *(Fault(f"a generation config with another type of {name}", GENERATE + " --target.name ./model",
            r"the target '\./model' could not be loaded \(.*set target\.name to",
            model({"generation_config.json": json.dumps({name: value})}))
      for name, value in (("suppress_tokens", "abc"), ("begin_suppress_tokens", 3), ("bad_words_ids", [5]),
                          ("min_new_tokens", "x"), ("eos_token_id", [2, "a"]), ("repetition_penalty", "x"))),
    Fault("a folder without a tokenizer", DISTILL, r"the target '\./model' has no tokenizer .*; copy those of",
          lambda place: (write_model(place) / "tokenizer.json").unlink(), leaves=("out/*",)),
    Fault("fewer words than the tokenizer has", GENERATE + " --target.name ./model",
          r"gives '.' the id 90, but its embedding has 90 rows; use the tokenizer", model(vocab_size=90)),
    Fault("weights whose header claims all memory", GENERATE + " --target.name ./model",
          r"model\.safetensors is no readable safetensors file .* copy it again",
          model({"model.safetensors": (2**62).to_bytes(8, "little") + b"{}"})),
]


MODEL_FAULTS = [
    *(Fault(f"a chat template {name}", f"{SHORT} --target.chat_template t.jinja",
            r"chat template fails: .*; change the messages, or set target\.chat_template", written("t.jinja", source))
      for name, source in TEMPLATES.items()),
    *(Fault(f"a config of {name}", "plan --config {tiny} --target.name m", says, bare(config))
      for name, config, says in CONFIGS),
    *(Fault(f"a tokenizer {name}", f"{SHORT} --target.name m", "could not be loaded .*set target.name",
            bare(LLAMA, content)) for name, content in TOKENIZERS.items()),
    Fault("devices that are not here", "run --config {tiny} --out o --train.accelerator gpu",
          r"train\.accelerator 'gpu'.* cannot train here .*; set train\.accelerator: auto", leaves=("o/*",)),
    Fault("a strategy that does not exist", "run --config {tiny} --out o --train.strategy fast",
          r"train\.strategy must be one of auto, ddp, .*, got 'fast'"),
]


@pytest.mark.parametrize("fault", [*some_long(FAULTS, 3), *some_long(MODEL_FAULTS, 2)], ids=ids(FAULTS + MODEL_FAULTS))
def test_a_wrong_target_is_refused_before_it_runs_or_takes_memory(
    fault: Fault, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    check(fault, place)
    assert not (place.folder / "ran").exists()


def test_code_beside_a_known_architecture_is_left_alone(place: Place) -> None:
    with_code()(place)
    assert main([*PLAN.format(tiny="tiny").split()]) == 0
    assert "24,992 parameters" in place.capfd.readouterr().out
    assert not (place.folder / "ran").exists()


def test_code_runs_for_who_asks_on_the_command_line(place: Place, monkeypatch: pytest.MonkeyPatch,
                                                    tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    with_code(model_type="own")(place)
    assert main([*PLAN.format(tiny="tiny").split(), "--target.trust_remote_code", "true"]) == 0
    assert (place.folder / "ran").exists()


def test_an_artifact_of_a_folder_decodes_with_the_folder_that_the_user_names(place: Place) -> None:
    targets("./model")(place)
    words = ["generate", "--artifact", str(place.artifact), "--prompt", "hi", "--max_new_tokens", "4"]
    assert main([*words, "--target.name", "./model"]) == 0
    assert "tokens per pass" in place.capfd.readouterr().err
