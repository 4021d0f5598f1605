"""Scripts in environments of their own, one process at a time: engines pin versions that this project has not."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ..modules import UserError

JOBS = Path(__file__).with_name("engine_jobs.py")  # The script that knows the engines
_SHOWN = 25  # Last lines of a failed process that are shown
GIVE = "give the bin/python of an environment with {}"  # Remedy for a wrong interpreter
_PATIENCE = 60  # Seconds in which an interpreter must answer: the first start from a slow disk takes some


def run_job(job: dict[str, Any], python: Path, folder: Path, asked: str, script: Path = JOBS) -> dict[str, Any]:
    """The result of a JSON-ready job, whose `engine` names it for people and for `engine_jobs.py`: by a script in an
    environment with this interpreter, started anew for each job, since engines give no memory back. Files of the job
    are named from the folder. Raises UserError if the process does not start, or fails, with the end of its output and
    what was `asked`."""
    engine = job["engine"]
    with tempfile.TemporaryDirectory() as scratch:
        given, result = Path(scratch, "job.json"), Path(scratch, "result.json")
        given.write_text(json.dumps(job))
        # Engines log to both streams: together they are in the order of what happened.
        try:
            done = subprocess.run([str(python.absolute()), str(script), str(given), str(result)], cwd=folder,
                                  # The files next to a script are no modules of its environment.
                                  env={**os.environ, "PYTHONSAFEPATH": "1"}, text=True, errors="replace",
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        except OSError as error:
            raise UserError(f"{python} does not start ({error.strerror}); {GIVE.format(engine)}") from error
        if done.returncode != 0 or not result.is_file():
            last = "\n".join(done.stdout.strip().splitlines()[-_SHOWN:])
            raise UserError(f"{engine} ended with code {done.returncode}, {asked}; "
                            + (f"its last lines:\n{last}" if last else
                               "it printed nothing: try a machine with more memory, or run it by hand"))
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def require_engine(python: Path, engine: str, module: str) -> None:
    """Refuse an interpreter that does not start, or has no such Python module of the engine, before anything is
    computed or written for it. Raises UserError."""
    give = GIVE.format(engine)
    if not python.is_file():
        raise UserError(f"there is no interpreter {python}; {give}")
    look = f"import importlib.util as i, sys; p = i.find_spec({module.split('.')[0]!r}); print(sys.version_info[0], " \
           f"bool(p and i.find_spec({module!r})))"
    try:
        done = subprocess.run([str(python.absolute()), "-c", look], env={**os.environ, "PYTHONSAFEPATH": "1"},
                              stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer in {_PATIENCE} seconds"
        raise UserError(f"{python} does not start ({reason}); {give}") from error
    answer = done.stdout.split()[-2:]
    if answer == [b"3", b"False"]:
        raise UserError(f"there is no {engine} in the environment of {python}; {give}")
    if done.returncode != 0 or answer != [b"3", b"True"]:
        raise UserError(f"{python} does not answer as Python 3 does; {give}")
