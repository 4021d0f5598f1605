"""Scripts started in several processes of this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANGING = 3600.0  # Seconds after which a process hangs: those of the longest test on a busy machine, twenty times


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Output of a script, or of a module (`-m`, its name), with its arguments when torchrun has started it."""
    return start(*launcher(processes), *command)


def launcher(processes: int) -> list[str]:
    """Arguments of Python that start what follows them in so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """Output of Python with these arguments, on one thread and without a network."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=HANGING,
                          cwd=ROOT, env=environment())


def environment() -> dict[str, str]:
    """Variables of a started process: one thread, no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
