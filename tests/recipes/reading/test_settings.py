"""Every key is set by a shipped recipe or serves a user's own target, data, engine or machine; they are few."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from draftsmith.recipes.commands.acceptance_head import SpecdecArguments
from draftsmith.recipes.reading.parsing import LINE_ONLY
from draftsmith.recipes.reading.recipe_keys import keys_of
from draftsmith.recipes.recipe import Recipe
from draftsmith.trainers import TrainConfig
from draftsmith.trainers.families import family_configs, family_names

MOST_KEYS = 155
OWN = {
    "the user's target": ("target.device", "target.pack", "target.chat_template", "target.revision",
                          "target.quantization", "template.system", "template.tools", "template.enable_thinking",
                          "template.date"),
    "the user's prompts": ("prompts.subset", "prompts.split", "prompts.revision", "prompts.streaming",
                           "prompts.column", "prompts.limit", "prompts.most_skipped"),
    "answers sampled, written or drafted otherwise": (
        "distill.top_k", "distill.top_p", "distill.seed", "distill.answered_by", "distill.draft", "distill.engine"),
    "data and reference answers of other runs": ("data", "references"),
    "a small disk": ("batch.states_format",),
    "an engine of the user's that gives states": ("distill.states_from",),
    "the sampling of the user's application": (
        "evaluate.top_k", "evaluate.top_p", "evaluate.repetition_penalty"),
    "what an evaluation compares": ("evaluate.batch_sizes",),
    "how sure a block is of its guesses": ("drafter.confidence",),
    "acceptance heads of other drafts": ("fit.lr",),
    "the user's devices": ("train.strategy", "target.offload",
                           "evaluate.graphs", "evaluate.compile", "train.activation_checkpointing",
                           "train.num_nodes"),
    "another draw": ("train.seed",),
    "another version of the user's target": ("retarget",),
    "checkpoints of other projects": ("drafter.tie_blocks", "drafter.rope_base", "drafter.bias"),
    "a draft model of the user's own shape or weights": (
        "drafter.hidden_size", "drafter.folder"),
    "drafts that decode through the target's layers or several tokens a pass": (
        "drafter.copies",),
    "training on another device than the target's": ("train.accelerator",),
}
"""Keys that no shipped recipe sets, by what they are for."""


def known() -> set[str]:
    """All keys of recipes and of the command specdec; those of families once, those of the command line alone not."""
    found = {*keys_of(Recipe, skip=("train",)), *keys_of(SpecdecArguments, skip=("target",))}
    for family in family_names():
        configs = family_configs(family)
        found |= {*keys_of(configs.drafter, "drafter."), *keys_of(configs.train, "train.", skip=("drafter",))}
    return (found | set(keys_of(TrainConfig, "train.", skip=("drafter",)))) - set(LINE_ONLY)


def named(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys that a recipe sets."""
    for name, value in content.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from named(value, f"{prefix}{name}.")


def test_every_key_has_a_use() -> None:
    recipes = Path(__file__).resolve().parents[3] / "recipes"
    used = {re.sub(r"^by_family\.\w+\.", "", name) for file in recipes.rglob("*.yaml")
            for name in named(yaml.safe_load(file.read_text()))}
    own = {name for names in OWN.values() for name in names}
    assert known() - used == own


def test_there_are_few_keys() -> None:
    assert len(known()) <= MOST_KEYS
