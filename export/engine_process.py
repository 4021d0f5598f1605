"""Scripts in environments of their own, one process at a time: engines pin versions that this project has not."""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..modules import UserError

_SHOWN = 25
"""Last lines of a failed process that are shown."""


@dataclass(frozen=True, kw_only=True)
class EngineProcess:
    """A script that reads a job and writes a result, started anew for each job: engines give no memory back."""

    engine: str
    """Name of the engine, for people."""
    python: Path
    """Interpreter of the environment."""
    script: Path
    """The script, called with the files of the job and of the result."""
    folder: Path
    """Current folder of the process: files of a job are named from here."""

    def run(self, job: dict[str, Any], asked: str) -> dict[str, Any]:
        """The result of a job.

        Args:
            job: JSON-ready.
            asked: what is run, for an error.

        Raises:
            UserError: if the interpreter cannot be started, or the process fails; with the end of its output.
        """
        if not self.python.is_file():
            raise UserError(f"there is no interpreter {self.python}; give the bin/python of an environment with "
                            f"{self.engine}")
        with tempfile.TemporaryDirectory() as scratch:
            given, result = Path(scratch, "job.json"), Path(scratch, "result.json")
            given.write_text(json.dumps(job))
            # Engines log to both streams: together they are in the order of what happened.
            done = subprocess.run([str(self.python.absolute()), str(self.script), str(given), str(result)],
                                  # The files next to a script are no modules of its environment.
                                  cwd=self.folder, env={**os.environ, "PYTHONSAFEPATH": "1"}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0 or not result.is_file():
                raise UserError(f"{self.engine} ended with code {done.returncode}, {asked}; its last lines:\n"
                                + "\n".join(done.stdout.splitlines()[-_SHOWN:]))
            found: dict[str, Any] = json.loads(result.read_text())
        return found
