"""DeepSpeed, which an extra of its own installs: where it is missing, and before it is used."""

import os
from importlib.util import find_spec

import torch

from .errors import UserError


def require_deepspeed(setting: str, instead: str, *, on_cpu: bool = False) -> None:
    """Refuse a setting that needs DeepSpeed where it is not installed, and prepare its first import.

    Args:
        setting: the key and its value.
        instead: a setting that does without.
        on_cpu: whether it must work on the CPU where an accelerator is, too.

    Raises:
        UserError: if it is not installed.
    """
    if find_spec("deepspeed") is None:
        raise UserError(f"{setting} needs DeepSpeed, which is not installed; run pip install 'draftsmith[deepspeed]', "
                        f"or set {instead}")
    if on_cpu or not torch.accelerator.is_available():
        # It chooses its device when it is first imported, and says on the screen that it has found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def prepare_deepspeed() -> None:
    """Let processes on a CPU join by gloo as it is: DeepSpeed would compile an addition to it for a minute, and with no
    compiler end."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
