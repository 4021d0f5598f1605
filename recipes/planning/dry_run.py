"""A recipe tried on the target's shape alone: a misfit is reported before hours of work."""

import torch

from ...export import FASTEST
from ...modules import Target, Topology, UserError, parse_joined, policy_named
from ...modules.target.loading.loading import is_gguf
from ...trainers import DraftModule
from ..recipe import Recipe


def dry_run(recipe: Recipe, target: Target) -> DraftModule:
    """The recipe's module with its drafter, built from shapes without values.

    Args:
        recipe: to be tried.
        target: a sketch, see `sketch_target`.

    Raises:
        UserError: if the family or its settings do not fit the target, rows or the tree have no room for its guesses,
            a policy asks for more than the family answers, states are to be stored that training changes, or the target
            cannot be placed as the recipe says.
    """
    target.placement.require_fit(target.model, recipe.train.world, gguf=is_gguf(recipe.target))
    module = recipe.module(target, torch.ones(target.vocab_size))
    module.configure_model()
    check_states(recipe, module)
    check_room(recipe, module)
    widest = Topology.from_paths([(), *((rank,) for rank in range(recipe.tree.searched_nodes - 1))])
    for name in recipe.evaluate.policy_names:
        if name == FASTEST:
            # Static, which every family answers.
            continue
        policy_named(parse_joined(name).own, widest, module.drafter)
    return module


def check_states(recipe: Recipe, module: DraftModule) -> None:
    """Refuse to store states of a target that training changes. Raises UserError."""
    if module.changes_target and recipe.batch.states not in ("computed", "auto"):
        raise UserError(f"batch.states is {recipe.batch.states!r}, but {type(module).__name__} trains the target, "
                        "whose states change with every step; set batch.states: computed")


def check_room(recipe: Recipe, module: DraftModule) -> None:
    """Refuse rows or a tree that are too small for the drafter's guesses. Raises UserError."""
    steps, length = module.drafter.trained_steps, recipe.batch.row_length
    if length < steps + 2:
        raise UserError(f"{steps} draft steps need rows of at least {steps + 2} tokens, but batch.row_length is "
                        f"{length}; raise it, or train fewer steps")
    reach, nodes = module.drafter.reach, recipe.tree.searched_nodes
    if reach is not None and reach >= nodes:
        raise UserError(f"a tree of tree.searched_nodes {nodes} is at most {nodes - 1} tokens deep, but this drafter "
                        f"guesses {reach}; raise tree.searched_nodes to at least {reach + 1}, or guess fewer tokens")
