"""One distillation as it is asked for: the models, the prompts, the settings, and their record in the manifest."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...modules import Target, UserError
from ...modules.files.fingerprints import files_digest
from ..prompts.chat import ChatTemplate
from ..prompts.given_answers import GivenAnswers, Turn
from ..prompts.prompt import Message, Prompt
from ..prompts.rows import LeftOutError
from ..prompts.self_prompting import OwnPrompts, Source
from ..prompts.sources import PromptConfig, ReadPrompts
from ..store.token_store import Manifest
from .distill_config import DistillConfig
from .writers import Writer, source_of

PACKAGES = ("draftsmith", "safetensors", "tokenizers", "torch", "transformers")
"""Packages whose versions decide the bytes of a shard."""


@dataclass(frozen=True, kw_only=True)
class DistillTask:
    """Arguments of a distillation that fit one another.

    Raises:
        UserError: if the recipe does not fit the source or the target; the message has the remedy.
        ValueError: if a caller gives a writer without `distill.draft`, or another target than `train_dtype` names.
    """

    target: Target
    """Answers held-out prompts; its identity and its states are those of the data."""
    train_target: Target
    """This model in the number format of `distill.train_dtype`: writes prompts and answers those of training."""
    prompts: PromptConfig
    config: DistillConfig
    template: ChatTemplate
    """Of the target's tokenizer."""
    writer: Writer | None
    """The draft that writes rows; None where none does."""

    def __post_init__(self) -> None:
        prompts, config, context = self.prompts, self.config, self.target.context_length
        endless = config.budget_tokens is None and config.budget_minutes is None and prompts.limit is None
        if prompts.origin == "own" and endless:
            raise UserError("prompts of the target have no limit; set distill.budget_tokens, distill.budget_minutes or "
                            "prompts.limit")
        if prompts.origin == "own" and "text" in config.shares:
            raise UserError("prompts.origin own has no ready-made answers; set distill.answered_by: target")
        if config.max_new_tokens >= context:
            raise UserError(f"distill.max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the "
                            f"target's context of {context} tokens; lower it")
        if prompts.max_prompt_tokens is not None and prompts.max_prompt_tokens + config.max_new_tokens > context:
            raise UserError(f"prompts.max_prompt_tokens {prompts.max_prompt_tokens} and distill.max_new_tokens "
                            f"{config.max_new_tokens} exceed the target's context of {context} tokens; lower one")
        if (self.writer is None) != (config.draft is None):
            raise ValueError("distill.draft names an artifact and the writer is its draft; give both or neither")
        wanted = self.target.dtype if config.train_dtype == "own" else getattr(torch, config.train_dtype, None)
        if self.train_target.dtype is not wanted:
            raise ValueError(f"train_target is in {self.train_target.dtype}, and distill.train_dtype is "
                             f"{config.train_dtype}; fastest is measured by draftsmith.recipes")
        self.train_target.identity.require_same(self.target.identity)

    def source(self) -> Source:
        """The candidates for prompts. Raises UserError if the target cannot write them as the recipe asks."""
        config = self.config
        if self.prompts.origin == "own":
            # Written prompts that do not fit are left out in silence: here it shows that none can.
            self.check(0, Prompt.from_turns("a", id="0"))
            return OwnPrompts(self.train_target, self.template, self.prompts, seed=config.seed, slots=config.slots,
                              check=self.check)
        return ReadPrompts(self.prompts, config.seed, self.check)

    @cached_property
    def given(self) -> GivenAnswers:
        """Turns of the answers that rows bring."""
        return GivenAnswers(self.template)

    @cached_property
    def unwritten(self) -> Counter[str]:
        """Number of checks of rows of which the chat template leaves something out, by what: tools, tool calls,
        thoughts."""
        return Counter()

    def check(self, number: int, prompt: Prompt) -> None:
        """Refuse a prompt that its writer cannot use: nobody answers documents, text brings answers, the template takes
        both, and all turns leave room for an answer. Raises UserError."""
        turns = list[Turn]()
        if source_of(number, self.config.shares, self.config.seed) == "text":
            if prompt.document is not None:
                # It is cut into pieces of any length.
                return
            if not prompt.learned:
                raise UserError("the row has no answer of its own; give messages with assistant turns, or set "
                                "distill.answered_by: target")
            turns = [self.given.turn(prompt.messages[:place], prompt.messages[place], prompt.tools)
                     for place in prompt.learned]
        # Rows that bring answers may be held out, and are asked then. The last question with all before it; the answers
        # between them are as short as they can be, since they end where they fill the context.
        said: list[Message] = [{"role": "assistant", "content": "a"}] * (len(prompt.asked) - 1)
        limit, room = self.prompts.max_prompt_tokens, self.target.context_length - self.config.max_new_tokens
        history = prompt.history(said)
        for mode in {self.template.mode(prompt, one) for one in range(len(self.template.modes))}:
            text = self.template.rendered(history, mode, True, prompt.tools)
            # No token is shorter than a byte. To count them takes ten times as long as to render them, and of all rows
            # of a large file only a few may be too long.
            if 0 < len(text.encode(errors="replace")) < (limit or room):
                continue
            size = len(self.template.prompt(history, tools=prompt.tools, thinking=mode)) - len(said)
            found = f"{size:,} tokens{' in all its turns' if said else ''}"
            if limit is not None and size > limit:
                raise LeftOutError(f"the prompt is longer than prompts.max_prompt_tokens, got {found}, more than "
                                   f"{limit:,}; nothing is to do")
            if size > room:
                raise UserError(f"the prompt leaves no room for an answer, got {found}, and the target's context of "
                                f"{self.target.context_length:,} less distill.max_new_tokens holds {room:,}; shorten "
                                "it, or lower distill.max_new_tokens")
        self.unwritten.update(self.template.unwritten(history, prompt.tools))
        self.unwritten.update(["thoughts"] * any(turn.thoughtless for turn in turns))

    def key(self, number: int, prompt: Prompt) -> int:
        """Hash of all that reaches the model of a train row: equal ones are duplicates."""
        given = source_of(number, self.config.shares, self.config.seed) == "text"
        return prompt.given_key if given else prompt.key

    def manifest(self) -> Manifest:
        """The manifest of these data before the first prompt."""
        source = asdict(self.prompts)
        # Files stand there by their content instead of their path, since folders may move.
        if source["path"] is not None and (place := Path(source["path"])).exists():
            source |= {"path": place.name, "sha256": files_digest(place, ("**/*",))}
        # How much may be skipped decides no byte: data that were refused for it go on with another setting.
        del source["most_skipped"]
        answers = {**asdict(self.config), "draft": None if self.writer is None else self.writer.digest}
        # Neither the number of processes nor a server's address decides a byte.
        del answers["workers"]
        if self.config.engine == "own":
            del answers["engine"]
        elif self.config.server is not None:
            answers["engine"] = "server"
        recipe: dict[str, Any] = json.loads(json.dumps({"prompts": source, "distill": answers}))
        return Manifest(target=self.target.identity, template_hash=self.template.hash, recipe=recipe,
                        versions={name: version(name) for name in PACKAGES})
