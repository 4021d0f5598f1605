"""The recipe: arguments of `run`, `distill`, `train` and `plan`; and its trial on the target's shape alone, so that a
misfit is reported before hours of work."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..data import DistillConfig, Manifest, PromptConfig, ReadPrompts, WantedStates
from ..data.datamodule import BatchConfig
from ..data.store.feature_shards import format_named, unlisted
from ..data.store.feature_store import in_words, nearest
from ..data.store.token_store import MANIFEST
from ..export import EvaluateConfig
from ..export.stored_drafter import load_drafter
from ..modules import FASTEST, Target, TargetConfig, Topology, UserError, parse_joined, policy_named
from ..modules.config_checks import CheckedSettings, Whole
from ..modules.policies.registry import MOST
from ..modules.target.loading.loading import gguf_of
from ..trainers import DraftModule, TrainConfig
from ..trainers.families import family_module
from ..trainers.train_config import Start
from .chat_settings import TemplateConfig

Choice = Literal["stored", "computed"]  # Origins of states that `auto` chooses between
MOST_OF_DISK = 0.9  # Share of the free disk that stored states fill at most: the rest of a run is written there too
TEMPLATE_TOKENS = 32  # Tokens of a chat template around a prompt
USUAL_PROMPT = 256  # Tokens of the longest prompt where nothing limits them


@dataclass(frozen=True, kw_only=True)
class TreeConfig(CheckedSettings):
    """The static draft tree: searched on held-out text, cut to the size that pays on this machine."""

    section: ClassVar[str] = "tree"

    searched_nodes: Annotated[int, Field(ge=2, le=MOST)] = 64
    """Nodes of the tree that is searched and stored in the artifact, root included, best ones first."""
    used_nodes: Whole | None = None
    """Number of these nodes that are drafted on this machine, root included, for greedy and for sampled rows; None
    measures the cost of a pass here and takes the best number for each, for sampled rows none where none pays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.used_nodes is not None and self.used_nodes > self.searched_nodes:
            raise UserError(f"tree.used_nodes must lie between 1 and tree.searched_nodes {self.searched_nodes}, got "
                            f"{self.used_nodes}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """From a target to a verified draft."""

    out: Path
    """Folder of the run: data, train, artifact, evaluation.json, report.html."""
    family: str
    """Family of the drafter by name, or with --trust the dotted path of a DraftModule subclass outside the package. One
    that differs from the recipe's leaves out the recipe's section drafter."""
    train: TrainConfig
    """Training; its field `drafter` is the recipe's section `drafter`."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The frozen language model."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    """Origin of the training prompts."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Number and sampling of the target's answers."""
    data: Path | None = None
    """Folder of data that another run distilled; None distils into the folder of this run."""
    references: Path | None = None
    """File of the target's own answers to held-out prompts, read and added to; shared by several runs, made once."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Training batches."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    """The draft tree."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation at the end: decoded prompts and timing."""
    trust: bool = False
    """Import the class that the recipe or an artifact names outside the package, which runs its code. Given on the
    command line, never in a recipe."""
    retarget: bool = False
    """Let `train.start` be an artifact of another target: an older version, a fine-tune or a quantised form of the same
    architecture with the same sizes and vocabulary. The draft then borrows from the new one."""

    def __post_init__(self) -> None:
        if self.retarget and self.train.start is None:
            raise UserError("retarget is true, and nothing is carried over to this target; name the artifact with "
                            "train.start, or leave --retarget out")

    def module(self, target: Target, label_weights: Tensor) -> DraftModule:
        """A new LightningModule of the recipe's family, its drafter not built yet."""
        module = family_module(self.family, trust=self.trust)(target, self.train, token_counts=label_weights)
        if self.train.start is not None:
            stored = load_drafter(Path(self.train.start), target, trust=self.trust, retarget=self.retarget)
            module.continue_from(Start(drafter=stored.drafter, adapter=stored.adapter,
                                       weights_sha256=stored.config["weights_sha256"]))
        return module


def opening(recipe: Recipe) -> int:
    """Longest prompt in tokens, with the template's own: as far as a recipe tells."""
    prompts = recipe.prompts
    return TEMPLATE_TOKENS + (prompts.own_max_tokens if prompts.origin == "own" else
                              prompts.max_prompt_tokens or USUAL_PROMPT)


def prompt_count(recipe: Recipe) -> int | None:
    """Number of a recipe's prompts, None where nothing limits it; UserError if their file cannot be read."""
    prompts = recipe.prompts
    if prompts.origin == "file" and Path(prompts.path or "").is_file():
        return ReadPrompts(prompts, recipe.distill.seed).total
    return prompts.limit


def dry_run(recipe: Recipe, target: Target) -> DraftModule:
    """The recipe's module with its drafter, built from shapes without values; the target is that of `sketch_target`.

    UserError if the family or its settings do not fit the target, rows or the tree have no room for its guesses, a
    policy asks for more than the family answers, states are to be stored that training changes, or the target cannot be
    placed as the recipe says."""
    target.placement.require_fit(target.model, recipe.train.world, gguf=gguf_of(recipe.target) is not None)
    module = recipe.module(target, torch.ones(target.vocab_size))
    module.configure_model()
    if module.changes_target and recipe.batch.states not in ("computed", "auto"):
        raise UserError(f"batch.states is {recipe.batch.states!r}, but {type(module).__name__} trains the target, "
                        "whose states change with every step; set batch.states: computed")
    if target.placement.slow:
        answers = recipe.distill
        decodes = recipe.data is None and (
            answers.server is None or recipe.prompts.origin == "own" or "draft" in answers.shares)
        if decodes or (module.needs_states and answers.states_from is None):
            raise UserError("target.placement disk reads every layer anew for a pass, so that an engine must answer "
                            "and give states; set distill.engine and distill.states_from to its address, and "
                            "prompts.origin to file, and let no draft write answers")
    if recipe.distill.states_from is not None and recipe.batch.states == "computed":
        raise UserError(f"distill.states_from is {recipe.distill.states_from}, whose states are stored, but batch."
                        "states is computed; set batch.states: stored, or leave distill.states_from out")
    steps, length = module.drafter.trained_steps, recipe.batch.row_length
    if length < steps + 2:
        raise UserError(f"{steps} draft steps need rows of at least {steps + 2} tokens, but batch.row_length is "
                        f"{length}; raise it, or train fewer steps")
    reach, nodes = module.drafter.reach, recipe.tree.searched_nodes
    if reach is not None and reach >= nodes:
        raise UserError(f"a tree of tree.searched_nodes {nodes} is at most {nodes - 1} tokens deep, but this drafter "
                        f"guesses {reach}; raise tree.searched_nodes to at least {reach + 1}, or guess fewer tokens")
    widest = Topology.from_paths([(), *((rank,) for rank in range(nodes - 1))])
    for name in recipe.evaluate.policy_names:
        if name == FASTEST:
            # Static, which every family answers.
            continue
        policy_named(parse_joined(name).own, widest, module.drafter)
    return module


def choose_states(recipe: Recipe, module: DraftModule, data: Path) -> tuple[Choice, str]:
    """(origin of the states with `batch.states: auto`, its reason): stored if they fit into the free disk of the data's
    folder, finished or to come. UserError if a manifest or a file of prompts cannot be read."""
    start, config = "batch.states auto takes", recipe.distill
    if not module.needs_states:
        return "computed", f"{start} computed: training reads tokens alone"
    if module.changes_target:
        return "computed", f"{start} computed: training changes the target, and its states with it"
    if config.states_from is not None:
        return "stored", f"{start} stored: {config.states_from} gives them"
    wanted = WantedStates(taps=module.drafter.taps, form=recipe.batch.states_format)
    if (data / MANIFEST).is_file() and (manifest := Manifest.load(data)).complete:
        form = format_named(wanted.form, module.target.dtype)
        tokens = sum(record.tokens for record in unlisted(data, manifest, wanted.taps, form))
    else:
        prompts = prompt_count(recipe)
        limits = [config.budget_tokens, None if prompts is None else prompts * config.max_new_tokens]
        answers = min((limit for limit in limits if limit is not None), default=None)
        if answers is None:
            return "computed", (f"{start} computed: nothing limits the answers before they are written, so that the "
                                "size of their states is not known; set distill.budget_tokens, or batch.states: stored")
        # States are stored at the tokens of prompts too.
        tokens = round(answers * (1 + opening(recipe) / config.max_new_tokens))
    size, free = wanted.bytes(tokens, module.target), shutil.disk_usage(nearest(data)).free
    choice: Choice = "stored" if size <= MOST_OF_DISK * free else "computed"
    return choice, (f"{start} {choice}: the states of {tokens:,} tokens would take {in_words(size)} more, and the disk "
                    f"has {in_words(free)} free")
