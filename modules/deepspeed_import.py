"""DeepSpeed, which is installed with an extra of its own."""

import os
from importlib.util import find_spec

import torch

from .errors import UserError


def require_deepspeed(setting: str, instead: str) -> None:
    """Refuse a setting that needs DeepSpeed where it is not installed, and prepare its first import.

    Args:
        setting: the key and its value.
        instead: a setting that does without.

    Raises:
        UserError: if it is not installed.
    """
    if find_spec("deepspeed") is None:
        raise UserError(f"{setting} needs DeepSpeed, which is not installed; run pip install 'draftsmith[deepspeed]', "
                        f"or set {instead}")
    if not torch.accelerator.is_available():
        # It chooses its device when it is first imported, and says on the screen that it has found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
