"""Target folders that bring code, claim other sizes than their weights have, or are named by an artifact."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import main
from safetensors.torch import load_file, save_file
from support.faults import Fault, Place, check, ids
from support.model_folders import CODE, model, with_code, write_model
from support.tiers import some_long

PLAN = "plan --config {tiny} --out out --target.name ./model"
DISTILL = "distill --config {tiny} --out out --target.name ./model"
GENERATE = "generate --prompt hi --artifact {artifact}"
TOKENIZER = json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_code.T", None]}})


def gguf(content: bytes) -> Callable[[Place], object]:
    """A preparation that writes a GGUF file with this content."""
    return lambda place: place.write("m.gguf", content)


def targets(name: str, **changes: object) -> object:
    """A preparation that changes the target that the artifact names."""
    def prepare(place: Place) -> None:
        file = place.artifact / "config.json"
        config = json.loads(file.read_text())
        config["target"] |= {"name": name, **changes}
        file.write_text(json.dumps(config))
        if name.endswith("model"):
            write_model(place)

    return prepare


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
    *(Fault(f"a GGUF file {name}", "plan --config {tiny} --out out --target.name ./m.gguf",
            r"the target '\./m\.gguf' could not be loaded \(.*set target\.name to", gguf(content))
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


@pytest.mark.parametrize("fault", some_long(FAULTS, 3), ids=ids(FAULTS))
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
    targets("./model")(place)  # type: ignore[operator]
    words = ["generate", "--artifact", str(place.artifact), "--prompt", "hi", "--max_new_tokens", "4"]
    assert main([*words, "--target.name", "./model"]) == 0
    assert "tokens per pass" in place.capfd.readouterr().err
