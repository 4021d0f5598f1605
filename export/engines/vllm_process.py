"""vLLM in an environment of its own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine_process import EngineProcess

SCRIPT = Path(__file__).with_name("vllm_run.py")


@dataclass(frozen=True)
class VllmProcess:
    """vLLM as it is started for each folder."""

    python: Path
    """Interpreter of the environment."""
    folder: Path
    """Current folder of the process: folders of models are named from here."""
    context: int
    """Largest context, in tokens."""

    def run(self, model: str, speculative: dict[str, Any] | None, prompts: Sequence[Sequence[int]], *,
            max_tokens: int, batch_sizes: Sequence[int] = (8,), loader: dict[str, Any] | None = None) -> dict[str, Any]:
        """The result of `vllm_run.py`.

        Args:
            model: folder of the model that is served.
            speculative: vLLM's configuration of drafts; None for none.
            prompts: token ids.
            max_tokens: tokens of each answer.
            batch_sizes: requests at once; all prompts are answered for each.
            loader: extra settings for loading.

        Raises:
            UserError: if the interpreter cannot be started, or the process fails; with the end of its output.
        """
        job = {"model": model, "speculative": speculative, "loader": loader or {}, "max_tokens": max_tokens,
               "prompts": [list(prompt) for prompt in prompts], "batch_sizes": list(batch_sizes),
               "context": self.context}
        process = EngineProcess(engine="vLLM", python=self.python, script=SCRIPT, folder=self.folder)
        return process.run(job, f"drafts {json.dumps(speculative)}")
