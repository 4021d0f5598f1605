"""Scripts started in several processes of this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(processes: int, *command: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Output of a script, or of a module (`-m`, its name), with its arguments when torchrun has started it."""
    return start(*launcher(processes), *command, timeout=timeout)


def launcher(processes: int) -> list[str]:
    """Arguments of Python that start what follows them in so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]


def start(*command: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Output of Python with these arguments, on one thread and without a network."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=timeout,
                          cwd=ROOT, env=environment())


def environment() -> dict[str, str]:
    """Variables of a started process: one thread, no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
