"""Chat messages become tokens, and every token knows whether the assistant wrote it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..modules import UserError

Message = Mapping[str, str]


class ChatTemplate:
    """A tokenizer's chat template with the settings that change what it renders.

    Args:
        tokenizer: of the target; without a chat template, conversations are plain text.
        system: system prompt of every conversation that brings none; None leaves it to the template.
        tools: JSON schemas of the tools the template may show.
        enable_thinking: passed to templates that know it; None leaves it to the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides what is rendered."""
        raise NotImplementedError

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to where the assistant's next answer begins (generation prompt added)."""
        raise NotImplementedError

    def render(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Tokens of a whole conversation and whether the assistant wrote each."""
        raise NotImplementedError
