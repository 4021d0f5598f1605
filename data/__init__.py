"""Prompts, answers by the target, and batches. `DraftDataModule` is imported from its file: it needs Lightning."""

from .answers.answering import Writer
from .answers.data_folder import read_held_out
from .answers.distill import distill
from .answers.distill_task import DistillConfig
from .prompts.chat import ChatTemplate
from .prompts.prompt import Message, Prompt
from .prompts.prompt_files import ReadPrompts, read_prompts
from .prompts.sources import PromptConfig
from .store.feature_store import WantedStates
from .store.token_store import Manifest, ShardRecord, TokenShard

__all__ = [
    "ChatTemplate", "DistillConfig", "Manifest", "Message", "Prompt", "PromptConfig", "ReadPrompts", "ShardRecord",
    "TokenShard", "WantedStates", "Writer", "distill", "read_held_out", "read_prompts",
]
