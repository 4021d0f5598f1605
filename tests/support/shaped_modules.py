"""Drafters of the shipped recipes for 8B models, for a target of any shape."""

import torch
from draftsmith.modules import Target
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.recipe import Recipe
from draftsmith.trainers import DraftModule
from support.model_shapes import SHAPES

RECIPES = ("eagle3", "medusa", "dspark", "hydra", "eagle", "falcon", "kangaroo", "prompt_tokens", "hidden_transfer",
           "fastdraft")
"""One recipe for each family of drafters that leaves the target as it is; a short measurement takes the first four."""


def shaped_recipe(name: str, shape: str, *words: str) -> Recipe:
    """A shipped recipe whose drafter fits the shape: draft vocabulary, layers and insertion points of the text."""
    layers, written = SHAPES[shape].config().num_hidden_layers, SHAPES[shape].written
    pair = ["--config", name, "--config", "eight_billion", "--out", "runs/shaped"]
    given = COMMANDS["run"].parse(pair).values.train.drafter
    fitting = {
        "vocabulary_size": min(given.vocabulary_size or written, written) if given.vocabulary_size else None,
        "layers": f"[0,1,{layers - 2},{layers - 1}]" if getattr(given, "layers", None) else None,
        "taps": f"{[*range(min(len(given.taps), layers))]}" if getattr(given, "taps", None) else None,
        "layer": 3 * layers // 4 if hasattr(given, "layer") else None,
        "mask_token_id": written - 1 if getattr(given, "mask_token_id", None) is not None else None,
        "insertions": min(given.insertions, written // 16) if hasattr(given, "insertions") else None,
    }
    options = [word for key, value in fitting.items() if value is not None for word in (f"--drafter.{key}", str(value))]
    recipe: Recipe = COMMANDS["run"].parse([*pair, *options, *words]).values
    return recipe


def shaped_module(recipe: Recipe, target: Target, shape: str) -> DraftModule:
    """The training module of a recipe with its drafter, whose reduced vocabulary are the tokens the target writes."""
    counts = torch.zeros(target.vocab_size)
    counts[: SHAPES[shape].written] = 1.0
    module = recipe.module(target, counts)
    module.configure_model()
    return module
