"""Folder of a run: its paths, and what its stages load from it."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...data import ChatTemplate, DistillConfig, Manifest, Prompt, WantedStates
from ...data.answers.distill_task import raised_limits
from ...data.datamodule import BatchConfig, learned_around
from ...data.prompts.chat import Surroundings
from ...data.store.token_store import MANIFEST, count_labels, prompts_learnable
from ...export.evaluation.schedule import require_context
from ...export.stored_drafter import CONFIG, read_description
from ...modules import Mtp, MtpConfig, Target, TargetConfig, TargetIdentity, UserError, load_target
from ...modules.baselines.registry import NATIVE
from ...modules.files.atomic_files import file_sha256, write_file
from ...modules.files.folders import FolderLocks
from ...modules.files.json_records import read_record
from ...modules.processes import Processes
from ...modules.target.devices.placement import Placement, placement_named
from ...modules.target.loading.hf_folder import NativeHead, folder_digest
from ...modules.target.loading.loading import FASTEST, fastest_format, gguf_of, is_local, load_in_format, sketch_target
from ...trainers import DraftModule
from ...trainers.fitting import require_devices, require_processes
from ...trainers.train_config import decisive_settings
from ..chat_settings import AskedSets, TemplateConfig
from ..reading.command_line import Parsed
from ..recipe import Choice, Recipe, choose_states, dry_run
from ..terminal import say

MACHINE = "machine.json"  # File of what a run has measured or chosen for this machine before its first stage
CHOOSING = "machine.lock"  # File whose lock is held by the process that measures and chooses, where several answer
CHOSEN = {"dtype": "target.dtype fastest", "train_dtype": "distill.train_dtype fastest", "states": "batch.states auto"}
"""Settings by the names of the choices that they leave open."""


@dataclass(frozen=True, kw_only=True)
class MachineRecord:
    """Measurements of which bytes of a run depend, made once when it started."""

    dtype: Literal["float32", "bfloat16"] | None = None  # Number format of the target; None where it was not measured
    train_dtype: Literal["float32", "bfloat16"] | None = None  # The same, in which it answers train prompts
    states: Choice | None = None  # Origin of the target's states; None where the recipe names it


class Workspace:
    """A run's folder and recipe, with its settings as JSON values. The target is loaded when a stage asks for it."""

    def __init__(self, parsed: Parsed[Recipe]) -> None:
        self.recipe, self.settings, self.out = parsed.values, parsed.settings, parsed.values.out
        self.data = self.recipe.data or self.out / "data"
        self.training, self.artifact = self.out / "train", self.out / "artifact"
        self.trains = False  # This command trains too; others need not have been started in the processes that train
        self.evaluates = False  # It evaluates too: what it would ask must fit the target before anything is learnt

    @cached_property
    def tried(self) -> DraftModule:
        """The recipe's module on a sketch of the target, both without values: shapes decide what a run stores. Raises
        UserError if the recipe does not fit the target."""
        return dry_run(self.recipe, sketch_target(self.recipe.target))

    @cached_property
    def target(self) -> Target:
        """The target of the recipe. Raises UserError if it is another one than answered complete data."""
        say(f"     loading the target {self.recipe.target.name}")
        target = load_target(replace(self.recipe.target, dtype=self.number_format))
        if target.linears.packing.times is not None:
            say(f"     {target.linears.packing.in_words}")
        if (found := self.answered_data) is not None:
            # An id of the hub without a revision may name other weights than it did.
            found.target.require_same(target.identity, what=str(self.data), remedy="choose another --out" if
                                      self.recipe.data is None else "leave data out to distil anew")
        # Before any prompt is answered: the sketch has no files.
        if self.trains_head or (self.evaluates and NATIVE in self.recipe.evaluate.baseline_names):
            Mtp.native(target)
        # A mask that is a token of the text, or a start that does not fit, is reported before any prompt is answered:
        # the sketch has no tokenizer and compares shapes alone.
        self.recipe.module(target, torch.ones(target.vocab_size))
        if self.recipe.train.start is not None:
            former = TargetIdentity.from_dict(read_description(Path(self.recipe.train.start))["target"])
            if self.recipe.retarget:
                adapted = " with its adapter" if target.adapter else ""
                say(f"     carries the draft for {former.name} over to {target.identity.name}{adapted}")
            if former.tokens_hash not in ("", target.identity.tokens_hash):
                say(f"     the tokenizers of {former.name} and {target.identity.name} differ: what the draft knows of "
                    "ids that mean other text now is of no use")
        return target

    @property
    def trains_head(self) -> bool:
        """True where training starts from the head in the target's files."""
        return self.recipe.train.start is None and isinstance(self.recipe.train.drafter, MtpConfig)

    @cached_property
    def number_format(self) -> Any:
        """The target's number format. A measured one is kept in the run's folder: all its data are made in one format,
        also when it is resumed. Raises UserError if that file is damaged."""
        chosen = self.recipe.target.dtype
        if chosen != FASTEST:
            return chosen
        return self._kept("dtype", partial(self._fastest, "drafted decoding"))

    @cached_property
    def distill_config(self) -> DistillConfig:
        """The settings of the answers, with the number format of train prompts measured where that is asked for. Raises
        UserError as `number_format` does."""
        config = self.recipe.distill
        if config.train_dtype != FASTEST:
            return config
        decodes = self.recipe.prompts.origin == "own" or "target" in config.shares
        if self.target.device.type != "cpu" or not decodes:
            return replace(config, train_dtype="own")
        choose = partial(self._fastest, f"answering {config.slots} prompts at once", config.slots)
        return replace(config, train_dtype=self._kept("train_dtype", choose))

    def train_target(self) -> Target | None:
        """The target in the number format of train prompts; None where that is its own."""
        wanted = self.distill_config.train_dtype
        if wanted == "own" or self.target.dtype is getattr(torch, wanted):
            return None
        say(f"     casting it to {wanted}, to answer train prompts")
        return load_in_format(self.recipe.target, self.target, getattr(torch, wanted))

    def _fastest(self, work: str, rows: int | None = None) -> tuple[str, str]:
        """(the number format in which the target decodes so many rows fastest here, the reason)."""
        found = fastest_format(self.recipe.target, rows)
        return found, f"{work} was measured to be fastest in {found}"

    def _kept(self, name: Literal["dtype", "train_dtype", "states"], choose: Callable[[], tuple[str, str]]) -> Any:
        """Setting that was measured or chosen for this machine once, kept in the run's folder under this name; where it
        is not, `choose` returns it and the reason. Raises UserError if the file is damaged, or several processes would
        choose.

        Where several processes answer, the first one that asks chooses, and the others wait until it has."""
        file, lost = self.out / MACHINE, "delete the folder's data too if you delete it: they may be in another format"
        record = read_record(MachineRecord, file, lost) if file.is_file() else MachineRecord()
        if (found := getattr(record, name)) is not None:
            return found
        if Processes.launched().world > 1:
            raise UserError(f"{file} does not say yet what this run takes for {CHOSEN[name]}; run "
                            "draftsmith distill with this recipe without torchrun, or name it in the recipe")
        with ExitStack() as stack:
            if self.recipe.distill.workers is not None:
                locks = stack.enter_context(closing(FolderLocks(self.out / CHOOSING)))
                stack.enter_context(locks.holding(0))
            # Another process, on this machine or another, may have chosen in the meantime: its choice is that of all.
            record, chosen = read_record(MachineRecord, file, lost) if file.is_file() else record, dict[str, Any]()
            if getattr(record, name) is None:
                chosen[name], reason = choose()
                record = replace(record, **chosen)
                kept = {key: value for key, value in asdict(record).items() if value is not None}
                write_file(file, json.dumps(kept, indent=2) + "\n")
                say(f"     {reason}; {file} keeps that")
            return getattr(record, name)

    @cached_property
    def batch(self) -> BatchConfig:
        """The settings of the batches, with the origin of states chosen where the recipe leaves it open. Raises
        UserError as `choose_states` and `_kept` do."""
        config = self.recipe.batch
        if config.states != "auto":
            return config
        choose = partial(choose_states, self.recipe, self.tried, self.data)
        return replace(config, states=self._kept("states", choose))

    @cached_property
    def template(self) -> ChatTemplate:
        """Its chat template with the recipe's settings."""
        return self.recipe.template.build(self.target)

    @cached_property
    def around_prompts(self) -> Surroundings | None:
        """Tokens around a prompt that the target wrote; None where prompts are not learned, which is reported where the
        recipe asks for it."""
        if not self.recipe.batch.own_prompts:
            return None
        if prompts_learnable(self.manifest().recipe["prompts"]):
            return self.template.user_turn()
        say("     only answers are learned: the target did not write these prompts after its chat template alone")
        return None

    @cached_property
    def label_weights(self) -> Tensor:
        """Counts of each token of the vocabulary as a label in training, [V]."""
        return count_labels(self.data, learned_around(self.manifest(), self.recipe.batch, self.around_prompts))

    @cached_property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide what stages leave.

        A limit of the batches that is not set decides nothing, nor does the place of the target's and the drafter's
        weights or the number of processes that answer or, as long as they read as many micro-batches together, train.
        Where a draft starts from the model in a folder or the head in the target's, or continues an artifact, these
        decide: others may have been put there since."""
        target, answers, drafter, train, evaluate = (
            dict(self.settings[name]) for name in ("target", "distill", "drafter", "train", "evaluate"))
        readers = [section for section, reads in ((drafter, self.trains_head), (
            evaluate, NATIVE in self.recipe.evaluate.baseline_names)) if reads]
        # What a hub id names has a revision, and its files may not be here yet.
        if readers and is_local(self.recipe.target.name):
            digest = NativeHead.find(self.tried.target).digest
            for section in readers:
                section["head_in_target"] = digest
        for name in ("placement", "degree", "offload", *([] if target["adapter"] else ["adapter"])):
            target.pop(name)
        answers.pop("workers")
        answers.pop("states_from")
        # A server's address is one machine's.
        answers["engine"] = "own" if answers["engine"] == "own" else "server"
        if drafter.get("folder") is not None:
            drafter["model_in_folder"] = folder_digest(Path(drafter["folder"]))
        if train["start"] is not None:
            start = Path(train["start"])
            if start.resolve() == self.artifact.resolve():
                raise UserError(f"train.start is {start}, the artifact that this run would write; choose another --out")
            read_description(start)
            train["start"] = file_sha256(start / CONFIG)
        # The origin of states as it was chosen.
        batch = {name: value for name, value in self.settings["batch"].items() if value is not None}
        batch["states"] = self.batch.states
        return {**self.settings, "target": target, "distill": answers, "drafter": drafter, "batch": batch,
                "train": decisive_settings(train), "evaluate": evaluate}

    @property
    def answered_data(self) -> Manifest | None:
        """The manifest of the data; None where they are not complete. Raises UserError if it is damaged."""
        if not (self.data / MANIFEST).is_file():
            return None
        found = Manifest.load(self.data)
        return found if found.complete else None

    @property
    def raised_limits(self) -> dict[str, Any]:
        """Limits of this recipe that let its complete data grow, by name; empty where the data are not complete, or
        have as high ones. Raises UserError if their manifest is damaged."""
        found = self.answered_data
        return {} if found is None else raised_limits(found.recipe.get("distill", {}), asdict(self.recipe.distill))

    def manifest(self) -> Manifest:
        """The manifest of finished data. Raises UserError if distillation has not been run to its end."""
        if self.recipe.data is not None and not self.recipe.data.is_dir():
            raise UserError(f"data names {self.recipe.data}, which is no folder; give the data folder of a finished "
                            "run, or leave it out to distil")
        if (manifest := self.answered_data) is None:
            raise UserError(f"{self.data} holds no complete data; run draftsmith distill with this recipe first")
        return manifest

    def data_identity(self) -> str:
        """Identity of data that another run distilled: its hash, and the target and template that read it. Raises
        UserError if the data is not complete."""
        return json.dumps([self.manifest().hash, self.decisive["target"], self.settings["template"]], sort_keys=True)

    def check(self) -> None:
        """Try the recipe's devices, and the recipe on the target's shape, before any work. Raises UserError."""
        if self.trains:
            self.placement.require_processes(self.recipe.train.world)
            require_processes(self.recipe.train)
        require_devices(self.recipe.train)
        _ = self.tried
        if self.evaluates and self.placement.slow:
            raise UserError("target.placement disk reads every layer anew for a pass, so that decoding is not measured "
                            "here; call draftsmith distill and draftsmith train in place of run, and draftsmith "
                            "evaluate where the target is whole")

    @property
    def placement(self) -> Placement:
        """The devices and processes that hold the target. Raises UserError if there is no such placement."""
        target = self.recipe.target
        return placement_named(target.placement, target.degree, offload=target.offload)

    def require_askable(self, own: Sequence[Prompt] = ()) -> None:
        """Refuse questions of a later evaluation that cannot be read or do not fit the target's context, with a run's
        `own` held-out ones. Raises UserError."""
        if self.evaluates:
            config, context = self.recipe.evaluate, self.target.context_length
            sets, _ = AskedSets.of(config, own).questions(self.template, config, context, [self.tried.drafter])
            require_context(sets, config, context)

    def wanted_states(self) -> tuple[WantedStates, ...]:
        """The target's states that training reads from disk; none where it reads none, or has them computed. Raises
        UserError if the recipe does not fit the target."""
        module, batch = self.tried, self.batch
        # An engine gives them once the answers are complete.
        if batch.states == "computed" or not module.needs_states or self.recipe.distill.states_from is not None:
            return ()
        return (WantedStates(taps=module.drafter.taps, form=batch.states_format),)

    def module(self) -> DraftModule:
        """A new LightningModule of the recipe's family, with its drafter."""
        module = self.recipe.module(self.target, self.label_weights)
        module.configure_model()
        return module


def target_files(target: TargetConfig, template: TemplateConfig) -> dict[str, list[Path]]:
    """Files here that a target and its chat template are read from, by their settings; a hub id has a revision."""
    if (gguf := gguf_of(target)) is not None:
        model = [gguf]
    else:
        # Of what lies deeper, such as a run's own folder, only templates.
        folders = (Path(target.name), Path(target.name, "additional_chat_templates")) if is_local(target.name) else ()
        model = sorted(file for folder in folders for file in folder.glob("*") if file.is_file())
    others = {"target.chat_template": target.chat_template, "template.tools": template.tools}
    adapter = [] if target.adapter is None else sorted(Path(target.adapter).glob("adapter_*"))
    return {"target.name": model, **({"target.adapter": adapter} if adapter else {}),
            **{name: [] if file is None else [Path(file)] for name, file in others.items()}}
