"""DeepSpeed, which an extra of its own installs: where it is missing, and before it is used."""

import os
from importlib.util import find_spec

import torch

from .errors import UserError


def require_deepspeed(setting: str, instead: str, *, on_cpu: bool = False) -> None:
    """Refuse a `setting`, a key and its value, that needs DeepSpeed where it is not installed (UserError, with what
    does `instead`), and prepare its first import; `on_cpu` if it must work there although there is an accelerator."""
    if find_spec("deepspeed") is None:
        raise UserError(f"{setting} needs DeepSpeed, which is not installed; run pip install 'draftsmith[deepspeed]', "
                        f"or set {instead}")
    name_deepspeeds_device(on_cpu=on_cpu)


def name_deepspeeds_device(*, on_cpu: bool = False) -> None:
    """Name the CPU as DeepSpeed's device where there is no other, before any import of it: libraries import it wherever
    it is installed, and it says on the screen that it has found none."""
    if on_cpu or not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def prepare_deepspeed() -> None:
    """Let processes on a CPU join by gloo as it is: DeepSpeed would compile an extension for a minute, and fail
    without a compiler."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
