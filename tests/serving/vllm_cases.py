"""Cases of vLLM, and proof that its server gives the states of the embedded target and adds an adapter to its base:
`make test-serving`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data import ChatTemplate, DistillConfig, PromptConfig, distill
from draftsmith.data.state_engines import engine_at, probe
from draftsmith.data.store.feature_store import Encoding
from draftsmith.export import Artifact, export_artifact
from draftsmith.export.engine_process import run_job
from draftsmith.export.engine_settings import TABLE, DraftSettings
from draftsmith.export.evaluation.engine_trial import vllm_answers
from draftsmith.export.layouts.parts.export_format import ADAPTED, ON_CPU, VLLM_ON_CPU, Places, Served
from draftsmith.export.layouts.registry import format_named
from draftsmith.modules import TargetConfig, Topology, UserError, load_target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from safetensors.torch import load_file, save_file
from serving.openai_client import SCRIPT
from serving.overfitted import ANSWER_TOKENS, PROMPT_TOKENS, STEPS, Texts, known, texts_of, tiny_llama
from serving.proof import Case, command, environment, ran, server
from support.adapters import write_adapter

LAYERS = "eagle_aux_hidden_state_layer_ids"
LOADER = "loader"  # Not a key of vLLM's configuration of drafts but its extra settings for loading


def shifted(folder: Path) -> None:
    """Name the layer before each tapped one, as if the ids counted outputs."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[LAYERS] = [layer - 1 for layer in config[LAYERS]]
    path.write_text(json.dumps(config))


def rolled(folder: Path) -> None:
    """Give every row of a matrix the scale of the row before it."""
    path = folder / "model.safetensors"
    held = load_file(path)
    save_file({name: tensor.roll(1, 0) if name.endswith("_scale") else tensor for name, tensor in held.items()}, path)


def unlearned(folder: Path) -> None:
    """Give the masks another state than the learned one."""
    path = folder / "model.safetensors"
    held = load_file(path)
    save_file({**held, "mask_hidden": -held["mask_hidden"]}, path)


ROUNDED = 0.95  # Share of drafted tokens that must be accepted where the weights have fewer bits
SHIFTED = "layers shifted by one"
DRAFT, FIRST, THIRD = (("method", "draft_model"),), (("method", "eagle"),), (("method", "eagle3"),)
MEDUSA, FLASH = (("method", "medusa"),), (("method", "dflash"),)
SERVED = Served(method=dict(THIRD), loader={}).commands(
    Places(drafts=DraftSettings(ranges=((1, 2, STEPS), (3, 4, 0), (5, 8, 1)), varies=True)), STEPS)
FEWER = tuple((key, value) for key, value in json.loads(shlex.split(SERVED["vLLM"])[-1]).items() if key == TABLE)
"""The printed table of numbers of tokens, which asks for one where eight requests are answered at once."""
VLLM_CASES = (
    Case(name="draft_lm", layout="huggingface", asked=DRAFT),
    Case(name="draft_lm", layout="huggingface", weights="int8", asked=DRAFT, least=ROUNDED),
    Case(name="draft_lm", layout="huggingface", weights="int8", asked=DRAFT, wrong="scales of other rows",
         change=rolled, least=ROUNDED),
    Case(name="draft_lm", layout="huggingface", weights="float8", asked=DRAFT, least=ROUNDED),
    Case(name="draft_lm, own output", layout="huggingface", weights="int8", asked=DRAFT, least=ROUNDED),
    Case(name="draft_lm, own output", layout="huggingface", weights="float8", asked=DRAFT, least=ROUNDED),
    Case(name="draft_lm, mask tokens", layout="huggingface", asked=(*DRAFT, ("parallel_drafting", True))),
    Case(name="eagle", layout="eagle", asked=FIRST),
    Case(name="eagle", layout="eagle", weights="int8", asked=FIRST, least=ROUNDED),
    Case(name="eagle, bias", layout="eagle", asked=FIRST, wrong="vLLM drops the bias"),
    Case(name="eagle3", layout="eagle", asked=THIRD, printed=True),
    Case(name="eagle3", layout="eagle", weights="int8", asked=THIRD, least=ROUNDED),
    Case(name="eagle3", layout="eagle", weights="float8", asked=THIRD, least=ROUNDED),
    Case(name="eagle3", layout="eagle", asked=THIRD, wrong=SHIFTED, change=shifted),
    Case(name="eagle3.1", layout="eagle", asked=THIRD),
    Case(name="eagle3, other norms", layout="eagle", asked=THIRD),
    Case(name="eagle3, two layers", layout="eagle", asked=THIRD),
    Case(name="eagle3, narrow", layout="eagle", asked=THIRD),
    Case(name="eagle3", layout="speculators", asked=THIRD),
    Case(name="eagle3", layout="speculators", weights="int8", least=ROUNDED),
    Case(name="eagle3", layout="speculators", wrong=SHIFTED, change=shifted),
    Case(name="eagle3.1", layout="speculators"),
    Case(name="eagle3, two layers", layout="speculators"),
    Case(name="eagle3, other norms", layout="speculators", asked=(*THIRD, *FEWER), fewer=True),
    Case(name="p_eagle", layout="eagle", asked=(*THIRD, ("parallel_drafting", True))),
    Case(name="p_eagle", layout="speculators"),
    Case(name="p_eagle", layout="speculators", wrong="another state of the masks", change=unlearned),
    Case(name="block, DFlash", layout="dflash", asked=FLASH),
    Case(name="block, DFlash, reduced", layout="speculators"),
    Case(name="block, JetSpec", layout="dflash", asked=FLASH),
    Case(name="block, JetSpec", layout="speculators"),
    Case(name="medusa", layout="medusa", asked=MEDUSA),
    Case(name="medusa", layout="medusa-vllm", asked=(*MEDUSA, (LOADER, {"enable_weights_track": False})), printed=True),
)
"""A case without a method is served as the model itself. A printed server compiles its layers for a minute: two stand
for all, whose commands differ in the configuration that the other cases give the same engine."""


ADDRESS = "http://localhost:8000"  # The server's own choice, which the printed Python names


@dataclass(frozen=True)
class Vllm:
    """vLLM in an environment of its own."""

    python: Path
    work: Path

    def prepare(self, texts: Texts) -> None:
        """Nothing: it reads the folders."""

    def plain(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Answers without drafts."""
        return self._run("target", None, prompts, {})

    def drafted(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with drafts."""
        asked = dict(case.asked)
        loader = asked.pop(LOADER, {})
        if not asked:
            return self._run(str(folder), None, prompts, loader)
        return self._run("target", {**asked, "model": str(folder), "num_speculative_tokens": STEPS}, prompts, loader)

    def printed(self, case: Case, folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same by the server that the folder's README.md prints, asked over HTTP by OpenAI's client."""
        place = self.work / folder
        # No setting of the proof's own but the silence: the command must do without.
        variables = environment(self.python, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
        job = {"engine": "OpenAI's client", "address": ADDRESS, "prompts": [list(prompt) for prompt in prompts],
               "max_tokens": ANSWER_TOKENS}
        with server(["bash", "-c", shlex.join(command(place, *VLLM_ON_CPU))], place, variables, f"{ADDRESS}/health"):
            found = run_job(job, self.python, place, f"asking the server of {folder}", SCRIPT)
        version = ran(["python", "-c", "import vllm; print(vllm.__version__)"], place, self.python).split()[-1]
        return {"engine": f"vLLM {version.split('+')[0]}", **found}

    def _run(self, model: str, speculative: dict[str, Any] | None, prompts: Sequence[Sequence[int]],
             loader: dict[str, Any]) -> dict[str, Any]:
        found = vllm_answers(self.python, self.work, model, speculative, prompts, loader=loader,
                             max_tokens=ANSWER_TOKENS, context=PROMPT_TOKENS + ANSWER_TOKENS + 24)
        return {"engine": found["engine"], **found["runs"][0]}


NAME = "states of the embedded target"
TAPS, STATES_AT = (1, 14, 26), "http://localhost:8001"
PROMPTS = ("What is a draft horse?", "Name three rivers.", "Count to ten.", "Who wrote Faust?", "What is rain?",
           "Say hello in French.")


def words(model: Path, files: Path, layers: list[int]) -> list[str]:
    """The server of the guide to large targets, in float32, with the connector as it runs on a CPU."""
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                   "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}}
    transfer = {"kv_connector": "CpuConnector", "kv_connector_module_path": "serving.cpu_connector",
                "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(files)}}
    return ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32",
            "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "8", "--port", STATES_AT.rpartition(":")[2],
            "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]


def prove_states(python: Path, work: Path) -> bool:
    """True if the states, stored by the command's own code, are the target's own, and other layers are refused."""
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
    with server(["bash", "-c", started], work, environment(python, settings), f"{STATES_AT}/health"):
        engine = engine_at(f"{STATES_AT}/v1", target)
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


ADAPTER = "an adapter next to its base"


def prove_adapter(python: Path, work: Path, drafters: Path) -> bool:
    """True if the printed server adds an adapter to its base and accepts every draft that was made for both, and the
    base alone answers otherwise. The base is the target of the other proofs less the adapter."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    base, adapter, folder = work / "base", work / "adapter", work / "adapted"
    wrapped = write_adapter(adapter, tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for layer in wrapped.modules():
        if isinstance(layer, LoraLayer):
            layer.get_base_layer().weight.data -= layer.get_delta_weight("default")
    wrapped.unload().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    target = load_target(TargetConfig(name=str(base), adapter=str(adapter), dtype="float32", device="cpu", pack=0))
    texts, layout = texts_of(target), format_named("eagle")
    artifact = Artifact(drafter=known("eagle3", target, texts, drafters, print), target=target,
                        topology=Topology.chain(STEPS), identity=target.identity, provenance={})
    export_artifact(artifact, target, "eagle", folder)
    places = Places(target="../base").adapted(target, "../adapter")
    words = layout.commands(artifact.drafter, places)[ON_CPU]
    variables = environment(python, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    job = {"engine": "OpenAI's client", "address": ADDRESS, "prompts": texts.prompts, "max_tokens": ANSWER_TOKENS}
    with server(["bash", "-c", words], folder, variables, f"{ADDRESS}/health"):
        found = run_job({**job, "model": ADAPTED}, python, folder, "asking for the adapter", SCRIPT)
        alone = run_job(job, python, folder, "asking for its base", SCRIPT)
    equal, other = (sum(map(list.__eq__, one["answers"], texts.answers)) for one in (found, alone))
    print(f"\n{ADAPTER}: {words}\n{equal} of {len(texts.answers)} answers are those of both, {found['accepted']} of "
          f"{found['drafted']} drafted tokens accepted; {other} answers of the base are the same", flush=True)
    return equal == len(texts.answers) and other < equal and found["accepted"] == found["drafted"] > 0
