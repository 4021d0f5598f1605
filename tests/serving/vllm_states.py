"""Proof that vLLM's server gives the states of the embedded target: they are stored by the command's own code, next to
those that the target computes itself; a server that taps other layers is refused."""

import json
import shlex
from pathlib import Path

from draftsmith.data import ChatTemplate, DistillConfig, PromptConfig, distill
from draftsmith.data.state_engines import engine_at, probe
from draftsmith.data.store.feature_store import Encoding
from draftsmith.modules import TargetConfig, UserError, load_target
from safetensors.torch import load_file
from serving.printed import environment, server

NAME = "states of the embedded target"
TAPS, ADDRESS = (1, 14, 26), "http://localhost:8001"
PROMPTS = ("What is a draft horse?", "Name three rivers.", "Count to ten.", "Who wrote Faust?", "What is rain?",
           "Say hello in French.")


def words(model: Path, files: Path, layers: list[int]) -> list[str]:
    """The server of the guide to large targets, in float32, with the connector as it runs on a CPU."""
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                   "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}}
    transfer = {"kv_connector": "CpuConnector", "kv_connector_module_path": "serving.cpu_connector",
                "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(files)}}
    return ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32",
            "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "8", "--port", ADDRESS.rpartition(":")[2],
            "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]


def prove_states(python: Path, work: Path) -> bool:
    """True if the states are the target's own, and those of other layers are refused."""
    target = load_target(TargetConfig())
    with target.native() as model:
        model.save_pretrained(work / "embedded")
    target.tokenizer.save_pretrained(work / "embedded")
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    data, files = work / "data", work / "files"
    files.mkdir()
    distill(target, PromptConfig(origin="file", path=str(work / "prompts.jsonl")),
            DistillConfig(max_new_tokens=16, validation_prompts=1, shard_prompts=3), ChatTemplate(target.tokenizer),
            data, progress=False)
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_HOST_IP": "127.0.0.1", "PYTHONPATH": str(Path(__file__).parents[1])}
    layers = [*(tap + 1 for tap in TAPS), target.num_layers]
    started = shlex.join(words(work / "embedded", files, layers))
    with server(["bash", "-c", started], work, environment(python, settings), f"{ADDRESS}/health"):
        engine = engine_at(f"{ADDRESS}/v1", target)
        served = Encoding(target, data, TAPS, read=engine)
        probe(engine, served)
        stored = {file.name: load_file(file)["states"] for file in served.run(progress=False)}
        refused = ""
        try:
            probe(engine, Encoding(target, data, tuple(tap + 1 for tap in TAPS), read=engine))
        except UserError as error:
            refused = str(error)
    (data / "features.json").unlink()
    gaps = []
    for file in Encoding(target, data, TAPS).run(progress=False):
        own_TD, found_TD = load_file(file)["states"], stored[file.name]
        gaps.append(float(((found_TD - own_TD).norm(dim=-1) / own_TD.norm(dim=-1)).max()))
    tokens = sum(len(one) for name, one in stored.items() if name.startswith("final"))
    print(f"\n{NAME}: of {tokens} tokens, within {max(gaps):.1e} of their length in float32, in {len(gaps)} files; "
          f"a server that taps other layers: {refused or 'NOT REFUSED'}", flush=True)
    return max(gaps) < 1e-3 and "gives the output of layer 1 where the output of layer 2 is asked for" in refused
