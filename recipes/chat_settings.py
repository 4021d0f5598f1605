"""Chat settings that the commands share: the template, rendered prompts, an artifact's own target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..data import ChatTemplate, Message, Prompt, read_prompts
from ..export import PromptSets, Question, read_description
from ..modules import Target, TargetConfig, TargetIdentity, UserError, load_target
from ..modules.files.json_records import read_json
from ..modules.target.loading.loading import is_local

ARTIFACT_TARGET = "artifact"
"""Stands for the target that the artifact names."""
HANDWRITTEN = Path(str(files(__package__) / "handwritten.jsonl"))


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """Settings of the chat template besides the messages. All of them are part of the template's hash."""

    system: str | None = None
    """System prompt of conversations that have none; None leaves it to the template."""
    tools: str | None = None
    """JSON file with a list of tool schemas for templates that show tools."""
    enable_thinking: bool | None = None
    """Passed to chat templates that have such a setting; None leaves it to the template."""

    def build(self, target: Target) -> ChatTemplate:
        """The template of `target` with these settings.

        Raises:
            UserError: if the tools file is not a JSON list of objects, or the template cannot be used.
        """
        tools: list[dict[str, Any]] | None = None
        if self.tools is not None:
            tools = read_json(Path(self.tools), "give template.tools a JSON list of tool schemas")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise UserError(f"template.tools {self.tools} must hold a JSON list of objects, one for each tool")
        return ChatTemplate(target.tokenizer, system=self.system, tools=tools, enable_thinking=self.enable_thinking)


def artifact_target(folder: Path, config: TargetConfig) -> Target:
    """The target to decode an artifact with. Raises UserError as `named_target` does, or if it cannot be loaded."""
    return load_target(named_target(folder, config))


def named_target(folder: Path, config: TargetConfig) -> TargetConfig:
    """The configuration of an artifact's target: the one its config.json names unless `config` names another.

    An artifact names no folder to be loaded, and nobody whose code is run: it may come from anybody.

    Raises:
        UserError: if the folder holds no artifact, or the user has to name the target.
    """
    name = TargetIdentity.from_dict(read_description(folder)["target"]).name
    if config.name != ARTIFACT_TARGET:
        return config
    if is_local(name):
        raise UserError(f"{folder} was made for the model in the folder or file {name}, which is loaded only if you "
                        "name it; give --target.name FOLDER")
    if config.trust_remote_code:
        raise UserError(f"target.trust_remote_code runs the code of a target that you name, and {folder} names {name}; "
                        f"add --target.name {name}, or leave target.trust_remote_code out")
    return replace(config, name=name)


def handwritten_prompts() -> list[Prompt]:
    """The 80 hand-written prompts that ship with the package; nothing is ever trained on them."""
    return read_prompts(HANDWRITTEN)


def question(template: ChatTemplate, prompt: Prompt) -> Question:
    """A prompt with all its user turns; the target's answers stand between them as text."""

    def ask(answers: Sequence[Sequence[int]]) -> list[int]:
        texts = [str(template.tokenizer.decode(list(answer), skip_special_tokens=True)) for answer in answers]
        said: list[Message] = [{"role": "assistant", "content": text} for text in texts]
        return template.prompt(prompt.history(said))

    return Question(prompt=ask, turns=len(prompt.asked), category=prompt.category or "", text=prompt.question)


def require_prompts(file: str, prompts: list[Prompt]) -> list[Prompt]:
    """The same prompts, once none of them is a plain document, which nobody can answer. Raises UserError."""
    if document := next((prompt.id for prompt in prompts if prompt.document is not None), None):
        raise UserError(f"{file} holds plain documents ({document}), which are not answered; give prompts, messages or "
                        "turns in place of text")
    return prompts


def prompt_sets(template: ChatTemplate, sets: dict[str, list[Prompt]]) -> PromptSets:
    """Named sets of prompts as questions to be answered turn by turn."""
    return {name: [question(template, prompt) for prompt in prompts] for name, prompts in sets.items()}
