"""Cases of vLLM: `make test-serving`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.export.engine_process import EngineProcess
from draftsmith.export.engines.trial import VllmProcess
from draftsmith.export.layouts.parts.export_format import VLLM_ON_CPU
from safetensors.torch import load_file, save_file
from serving.openai_client import SCRIPT
from serving.overfitted import ANSWER_TOKENS, PROMPT_TOKENS, STEPS, Texts
from serving.printed import command, environment, ran, server
from serving.proof import Case

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


ROUNDED = 0.95  # Share of drafted tokens that must be accepted where the weights have fewer bits
SHIFTED = "layers shifted by one"
DRAFT, FIRST, THIRD = (("method", "draft_model"),), (("method", "eagle"),), (("method", "eagle3"),)
MEDUSA, FLASH = (("method", "medusa"),), (("method", "dflash"),)
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
        process = EngineProcess(engine="OpenAI's client", python=self.python, script=SCRIPT, folder=place)
        with server(["bash", "-c", shlex.join(command(place, *VLLM_ON_CPU))], place, variables, f"{ADDRESS}/health"):
            found = process.run({"address": ADDRESS, "prompts": [list(prompt) for prompt in prompts],
                                 "max_tokens": ANSWER_TOKENS}, f"asking the server of {folder}")
        version = ran(["python", "-c", "import vllm; print(vllm.__version__)"], place, self.python).split()[-1]
        return {"engine": f"vLLM {version.split('+')[0]}", **found}

    def _run(self, model: str, speculative: dict[str, Any] | None, prompts: Sequence[Sequence[int]],
             loader: dict[str, Any]) -> dict[str, Any]:
        process = VllmProcess(self.python, self.work, context=PROMPT_TOKENS + ANSWER_TOKENS + 24)
        found = process.run(model, speculative, prompts, max_tokens=ANSWER_TOKENS, loader=loader)
        return {"engine": found["engine"], **found["runs"][0]}
