"""Chat settings that the commands share: the template, rendered prompts, an artifact's own target."""

import datetime
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ..data import ChatTemplate, Prompt, read_prompts
from ..data.prompts import named_sets
from ..data.prompts.chat import TODAY
from ..data.prompts.given_answers import GivenAnswers
from ..export import EvaluateConfig, PromptSets, Question, read_description
from ..export.evaluation.methods import COLUMNS
from ..export.evaluation.schedule import answer_room
from ..modules import Proposer, Target, TargetConfig, TargetIdentity, UserError, load_target
from ..modules.files.json_records import read_json
from ..modules.target.loading.loading import is_local
from ..modules.target.loading.stored_weights import Quantization

ARTIFACT_TARGET = "artifact"  # Stands for the target that the artifact names
HANDWRITTEN = Path(str(files(__package__) / "handwritten.jsonl"))
MODES = {None: "", True: "thinking", False: "not thinking"}  # Names of a template's modes in a report
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """Settings of the chat template besides the messages. All of them are part of the template's hash."""

    system: str | None = None
    """System prompt of conversations that have none; None leaves it to the template."""
    tools: str | None = None
    """JSON file with a list of tool schemas for templates that show tools."""
    enable_thinking: bool | tuple[bool, ...] | None = None
    """Passed to chat templates that have such a switch; [true, false] deals both to prompts in turn; None leaves it to
    the template."""
    date: str = str(TODAY)
    """Day for templates that ask for the date, whatever day it is; YYYY-MM-DD."""

    def __post_init__(self) -> None:
        # Python reads other forms of a date too, which would be other settings of the same day.
        with suppress(ValueError):
            if str(datetime.date.fromisoformat(self.date)) == self.date:
                return
        raise UserError(f"template.date must be a day such as {TODAY}, got {self.date!r}")

    def build(self, target: Target) -> ChatTemplate:
        """The template of `target` with these settings."""
        tools: list[dict[str, Any]] | None = None
        if self.tools is not None:
            tools = read_json(Path(self.tools), "give template.tools a JSON list of tool schemas")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise UserError(f"template.tools {self.tools} must hold a JSON list of objects, one for each tool")
        modes = self.enable_thinking if isinstance(self.enable_thinking, tuple) else (self.enable_thinking,)
        template = ChatTemplate(target.tokenizer, system=self.system, tools=tools, modes=modes or (None,),
                                ends=target.eos_ids, today=datetime.date.fromisoformat(self.date))
        end = GivenAnswers(template).end
        if end is not None and target.tokenizer.convert_tokens_to_ids(end) not in target.eos_ids:
            log.warning("the chat template ends an answer with %s, which is no end token of the target, so that it may "
                        "run on; add it to eos_token_id in the target's generation_config.json, or set "
                        "target.chat_template to the target's own", end)
        if template.unwritten([{"role": "user", "content": "a"}], tools):
            log.warning("the chat template does not show the tools of template.tools %s; set target.chat_template to "
                        "one that does, or leave template.tools out", self.tools)
        return template


def own_target() -> TargetConfig:
    """The artifact's own target, on the default device."""
    return TargetConfig(name=ARTIFACT_TARGET)


def artifact_target(folder: Path, config: TargetConfig) -> Target:
    """The target to decode an artifact with. Raises UserError as `named_target` does, or if it cannot be loaded."""
    return load_target(named_target(folder, config))


def named_target(folder: Path, config: TargetConfig) -> TargetConfig:
    """The configuration of an artifact's target: the one its config.json names unless `config` names another.

    An artifact names no folder to be loaded, and nobody whose code is run: it may come from anybody."""
    identity = TargetIdentity.from_dict(read_description(folder)["target"])
    name, rounded = identity.name, {form: form for form in get_args(Quantization)}.get(identity.quantization)
    # Its weights are rounded on reading as they were in training.
    config = replace(config, quantization=config.quantization or rounded)
    if config.name != ARTIFACT_TARGET:
        return config
    if identity.adapter and config.adapter is None:
        raise UserError(f"{folder} was made for {name} with an adapter ({identity.adapter[:12]}...), which is loaded "
                        "only if you name it; give --target.adapter FOLDER, or --target.name FOLDER of both merged")
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


def conversations(file: Path) -> list[Prompt]:
    """The prompts of a file that are answered. Raises UserError if one is a plain document."""
    prompts = read_prompts(file)
    if document := next((one.id for one in prompts if one.document is not None), None):
        raise UserError(f"{file} holds plain documents ({document}), which are not answered; give prompts, messages or "
                        "turns in place of text")
    return prompts


def question(template: ChatTemplate, prompt: Prompt, number: int = 0, columns: Container[str] = COLUMNS) -> Question:
    """A prompt with all its turns, by its number in its set; the target's answers stand between them as a server would
    give them back. Of the texts besides it those are read that stand in these `columns`."""
    thinking = template.mode(prompt, number)

    def ask(answers: Sequence[Sequence[int]]) -> list[int]:
        said = [template.said(answer, thinking) for answer in answers]
        return template.prompt(prompt.history(said), tools=prompt.tools, thinking=thinking)

    turns, (given, other) = len(prompt.asked), (getattr(prompt, key) if key in columns else None for key in COLUMNS)
    texts = given if isinstance(given, list) else [given] * turns * (given is not None)
    if given is not None and not (len(texts) == turns and all(isinstance(one, str) for one in texts)):
        raise UserError(f"{prompt.id}: reference must be a text, or a list of texts for the row's {turns} answers, got "
                        f"{given!r:.60}; write it so, or leave it out")
    draft_tokens = list[int]()
    if other is not None:
        if not isinstance(other, str) or turns > 1:
            raise UserError(f"{prompt.id}: draft_prompt must be a text in a row that asks for one answer, got "
                            f"{other!r:.60} for {turns}; write it so, or leave it out")
        draft_tokens = template.prompt([*prompt.history()[:-1], {"role": "user", "content": other}], tools=prompt.tools,
                                       thinking=thinking)
    return Question(prompt=ask, turns=turns, category=prompt.category or "", text=prompt.question, mode=MODES[thinking],
                    references=[template.tokenizer.encode(one, add_special_tokens=False) for one in texts],
                    draft_tokens=draft_tokens)


class AskedSets(NamedTuple):
    """The prompts of an evaluation."""

    prompts: dict[str, list[Prompt]]  # By the name of their set
    origins: dict[str, dict[str, Any]]  # Source, revision, licence and counts of each set that the evaluation names

    @classmethod
    def of(cls, config: EvaluateConfig, own: Sequence[Prompt] = ()) -> "AskedSets":
        """The sets that an evaluation names, else the hand-written prompts, after a run's `own` held-out ones. Raises
        UserError if one cannot be read, or two have one name."""
        found, origins = {"own": [*own]} if own else {}, dict[str, dict[str, Any]]()
        for given in config.prompt_names or (named_sets.HANDWRITTEN,):
            source = HANDWRITTEN if given == named_sets.HANDWRITTEN else named_sets.set_named(given)
            if isinstance(source, Path):
                name, every, without, facts = source.stem, conversations(source), 0, {"source": source.name}
            else:
                name, (every, without) = given, source.prompts()
                facts = {key: getattr(source, key) for key in ("source", "revision", "subset", "split", "licence")}
            if name in found:
                raise UserError(f"two sets are called {name}; rename a file of evaluate.prompts")
            if not every:
                raise UserError(f"the set {name} holds no prompt (rows without text: {without:,}); choose another set")
            if config.prompt_limit is not None:
                # By hashes of their words: a limit takes the same ones in whatever order a source has them.
                every.sort(key=lambda one: hashlib.sha256(json.dumps(one.messages, sort_keys=True).encode()).digest())
            found[name] = every
            origins[name] = {**facts, "rows": len(every) + without, "without text": without}
        return cls(found, origins if config.prompt_names else {})

    def questions(self, template: ChatTemplate, config: EvaluateConfig, context_length: int,
                  drafters: Iterable[Proposer] = ()) -> tuple[PromptSets, dict[str, dict[str, Any]]]:
        """(the sets as questions, their origins). Of a set by name the questions that leave no room for their answers
        in the target's context are left out, and counted: nobody can edit it. Columns that nobody reads stay out."""
        columns = config.columns(drafters)
        # By the ones of its number: prompts at equal distances, which a limited evaluation takes, have all modes too.
        sets = {name: [question(template, prompt, number.bit_count(), columns) for number, prompt in enumerate(prompts)]
                for name, prompts in self.prompts.items()}
        origins = dict[str, dict[str, Any]]()
        for name, facts in self.origins.items():
            had, rest, named = sets[name], iter(sets[name]), name in named_sets.table()
            # The limit comes after the room: the first ones drawn may all be too long.
            fits = (one for one in rest if not named or answer_room(one, context_length)[1] >= config.max_new_tokens)
            sets[name] = [*islice(fits, config.prompt_limit)]
            if not sets[name]:
                raise UserError(f"no prompt of the set {name} leaves room for {config.max_new_tokens} tokens in the "
                                f"target's context of {context_length:,}; lower max_new_tokens, or choose another set")
            origins[name] = {**facts, "prompts": len(sets[name]), "too long": len(had) - len([*rest]) - len(sets[name])}
        # A kind that several sets have is one of each: a table by category would else mix them.
        kinds = Counter(kind for name in origins for kind in {one.category for one in sets[name]})
        for name in origins:
            sets[name] = [replace(one, category=f"{name} {one.category}") if one.category and kinds[one.category] > 1
                          else one for one in sets[name]]
        return sets, origins


def read_sets(config: EvaluateConfig) -> dict[str, list[Path]]:
    """Files that decide the prompts of an evaluation, by their setting: those it names, and the table with the
    revisions of sets. Raises UserError if a name is none."""
    named = [named_sets.set_named(name) for name in config.prompt_names if name != named_sets.HANDWRITTEN]
    return {"evaluate.prompts": [named_sets.TABLE, *(one for one in named if isinstance(one, Path))]
            } if config.prompt_names else {}
