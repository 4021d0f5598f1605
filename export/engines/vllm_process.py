"""Processes of vLLM in an environment of their own, one at a time."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...modules import UserError

SCRIPT = Path(__file__).with_name("vllm_run.py")
_SHOWN = 25
"""Last lines of a failed process that are shown."""


@dataclass(frozen=True)
class VllmProcess:
    """vLLM as it is started for each folder: a fresh process each time, since it gives no memory back."""

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
        if not self.python.is_file():
            raise UserError(f"there is no interpreter {self.python}; give the bin/python of an environment with vLLM")
        job = {"model": model, "speculative": speculative, "loader": loader or {}, "max_tokens": max_tokens,
               "prompts": [list(prompt) for prompt in prompts], "batch_sizes": list(batch_sizes),
               "context": self.context}
        with tempfile.TemporaryDirectory() as scratch:
            given, result = Path(scratch, "job.json"), Path(scratch, "result.json")
            given.write_text(json.dumps(job))
            done = subprocess.run([str(self.python.absolute()), str(SCRIPT), str(given), str(result)], cwd=self.folder,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0 or not result.is_file():
                raise UserError(f"vLLM ended with code {done.returncode}, drafts {json.dumps(speculative)}; its last "
                                "lines:\n" + "\n".join(done.stdout.splitlines()[-_SHOWN:]))
            found: dict[str, Any] = json.loads(result.read_text())
        return found
