"""The commands that make an artifact: run, distill, train. Each is some of the same stages."""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..data import DistillConfig, Prompt, distill, encode, read_prompts
from ..data.datamodule import DraftDataModule
from ..export import (
    Method,
    Tuning,
    busy_warning,
    evaluate,
    load_artifact,
    save_artifact,
    save_tuning,
    terminal_table,
    with_drift,
    write_report,
)
from ..modules import (
    Drafter,
    Features,
    Topology,
    UserError,
    chance_table,
    choose_size,
    expected_lengths,
    measure_cost,
    rank_table,
    search_tree,
)
from ..modules.atomic_files import write_file
from ..trainers import DraftModule, FitResult, TrainConfig, fit
from .chat_settings import handwritten_prompts, prompt_sets
from .draft_writer import require_teacher, writer_digest, writer_of
from .parsing import Command, Parsed
from .recipe import Recipe
from .workspace import Stage, Workspace, run_stages

PLACES = ("out", "data", "references", "evaluate")
"""Recipe keys that say nothing about how an artifact was made."""
RESULT_FILE, STATS_FILE = "result.json", "stats.json"
SETTINGS_FILE, TEST_FILE = "settings.json", "test.jsonl"


def distill_stage(workspace: Workspace) -> Sequence[Path]:
    """The target answers prompts, or whoever else writes the training rows."""
    workspace.rehearse()
    recipe = workspace.recipe
    manifest = distill(workspace.target, recipe.prompts, recipe.distill, workspace.template, workspace.data,
                       writer=writer_of(workspace))
    return [workspace.data / "manifest.json", *(workspace.data / shard.file for shard in manifest.shards)]


def encode_stage(workspace: Workspace) -> Sequence[Path]:
    """Store the target's states at every token, unless the recipe has them computed in the training step."""
    workspace.rehearse()
    workspace.require_same_source()
    if workspace.recipe.batch.source == "tokens":
        print("     nothing to store: batch.source is tokens", flush=True)
        return []
    module = built_module(workspace)
    if not module.needs_states:
        print("     nothing to store: training reads tokens alone", flush=True)
        return []
    return encode(workspace.target, workspace.data, module.drafter.taps, room=workspace.recipe.batch.store_bytes)


def batches_for(workspace: Workspace, module: DraftModule) -> DraftDataModule:
    """The batches that a module trains on; without stored states where its training reads none."""
    config = workspace.recipe.batch
    if not module.needs_states:
        config = replace(config, source="tokens", store_gib=None)
    return DraftDataModule(workspace.data, config, module.drafter.taps)


def train_stage(workspace: Workspace) -> Sequence[Path]:
    """Train; the checkpoint with the greatest decoded accepted length is kept."""
    claim_settings(workspace)
    module = built_module(workspace)
    if workspace.manifest().written("draft"):
        require_teacher(module)
    result = fit(module, batches_for(workspace, module), workspace.training)
    if module.global_rank != 0:
        # Lightning started this process for the training alone: the first one goes on.
        raise SystemExit(0)
    content = {**asdict(result), "checkpoint": str(result.checkpoint.relative_to(workspace.training))}
    # What the machine decides stays out of what later stages depend on.
    stats = {name: content.pop(name) for name in ("precision", "seconds", "peak_memory_bytes")}
    write_file(workspace.training / STATS_FILE, json.dumps(stats, indent=2) + "\n")
    write_file(workspace.training / RESULT_FILE, json.dumps(content, indent=2) + "\n")
    return [workspace.training / RESULT_FILE, result.checkpoint]


def claim_settings(workspace: Workspace) -> None:
    """Write down what a training folder is for, so that another recipe or other data do not resume in it.

    Raises:
        UserError: if the folder was begun with other settings or data.
    """
    file = workspace.training / SETTINGS_FILE
    sections = {name: workspace.decisive[name] for name in ("model", "batch")}
    content = json.dumps({**sections, "data": workspace.manifest().hash}, indent=2, sort_keys=True) + "\n"
    if not file.is_file():
        write_file(file, content)
    elif file.read_text(encoding="utf-8") != content:
        raise UserError(f"{workspace.training} was begun with {difference(file, content)}; delete it to train anew, or "
                        "choose another --out")


def difference(file: Path, content: str) -> str:
    """The first line in which a settings file differs, for people."""
    former, wanted = file.read_text(encoding="utf-8").splitlines(), content.splitlines()
    pairs = ((a.strip(" ,"), b.strip(" ,")) for a, b in zip(former, wanted, strict=False) if a != b)
    old, new = next(pairs, ("other settings", "these"))
    return f"{old}, now it is {new}"


def artifact_stage(workspace: Workspace) -> Sequence[Path]:
    """Search the tree on held-out text, write the artifact, and measure which tree pays on this machine."""
    result, module = fit_result(workspace), built_module(workspace)
    module.restore(load_file(result.checkpoint))
    with torch.no_grad():
        target, held_out = module.verifier(validation(workspace, module))
    drafter = copy.deepcopy(module.drafter).to(device=target.device, dtype=target.dtype)
    drafter.bind(target)
    drafter.eval()
    topology, expected = held_out_tree(workspace, drafter, held_out)
    # Saved as trained: what measured above was rounded to the target's number format.
    save_artifact(workspace.artifact, module.drafter, workspace.target.identity,
                  provenance(workspace, result, expected), topology, module.adapter)
    cost = measure_cost(target, drafter, topology)
    given = workspace.recipe.tree.size
    size = min(given or choose_size(expected, cost.curve()).size, topology.size)
    tuning = replace(Tuning.of(target, size, cost, expected, given=given is not None),
                     expected_sampled=expected_lengths(chance_table(drafter, target, held_out), topology))
    save_tuning(workspace.artifact, tuning)
    print(f"     tree of {topology.size} nodes; used on this machine: {_use(tuning, 0.0)}; at temperature 1 "
          f"{_use(tuning, 1.0)}", flush=True)
    return [workspace.artifact / name for name in ("config.json", "model.safetensors", "README.md", "tuning.json")]


def _use(tuning: Tuning, temperature: float) -> str:
    """How much of the tree one row takes, for people."""
    size = tuning.size_for(1, temperature)
    if size == 1:
        return "none, drafting does not pay"
    lengths = tuning.expected_sampled if temperature else tuning.expected_accepted_length
    return f"{size}, {lengths[size - 1]:.2f} tokens per pass expected"


def validation(workspace: Workspace, module: DraftModule) -> list[Features]:
    """Held-out conversations with the target's states, on its device."""
    target = workspace.target
    moved = [batch.to(target.device) for batch in batches_for(workspace, module).validation_features()]
    return [batch if batch.encoded else target.encode(batch, module.drafter.taps) for batch in moved]


def held_out_tree(workspace: Workspace, drafter: Drafter,
                  held_out: Sequence[Features]) -> tuple[Topology, tuple[float, ...]]:
    """The best-first tree for the held-out ranks, and the expected accepted length of each of its prefixes."""
    with torch.no_grad():
        table_PK = rank_table(drafter, held_out)
    return search_tree(table_PK, workspace.recipe.tree.max_nodes, workspace.recipe.tree.max_rank)


def provenance(workspace: Workspace, result: FitResult, expected: tuple[float, ...]) -> dict[str, Any]:
    """Where the artifact comes from: nothing in it depends on the machine."""
    return {
        "recipe": {name: workspace.settings[name] for name in workspace.settings if name not in PLACES},
        "data_manifest": workspace.manifest().hash,
        "acceptance": {"accepted_length": result.accepted_length, "by_position": list(result.by_position)},
        "training": {"best_step": result.step, "steps": result.steps},
        "expected_accepted_length": list(expected),
    }


def evaluate_stage(workspace: Workspace) -> Sequence[Path]:
    """Held-out prompts and the hand-written ones, decoded through the artifact and by the target alone."""
    artifact = load_artifact(workspace.artifact, workspace.target)
    config = workspace.recipe.evaluate
    questions = prompt_sets(workspace.template, held_out_sets(workspace))
    methods = [Method.of(artifact, policy=policy) for policy in config.policies]
    result = evaluate(artifact.target, methods, questions, config, references=workspace.recipe.references)
    if artifact.adapter is not None:
        result = with_drift(result, workspace.target, artifact.target, questions, max_new_tokens=config.max_new_tokens)
    written = write_report(workspace.out, result, artifact)
    print(f"\n{terminal_table(result)}\n\n{written['html']} shows it with plots", flush=True)
    return list(written.values())


def held_out_sets(workspace: Workspace) -> dict[str, list[Prompt]]:
    """The target's own prompts that were kept from training, and the hand-written ones."""
    test = workspace.data / TEST_FILE
    own = {"own": read_prompts(test)} if test.is_file() and test.stat().st_size else {}
    return {**own, "handwritten": handwritten_prompts()}


def fit_result(workspace: Workspace) -> FitResult:
    """What training left.

    Raises:
        UserError: if it has not been run to its end.
    """
    files = [workspace.training / name for name in (RESULT_FILE, STATS_FILE)]
    if not all(file.is_file() for file in files):
        raise UserError(f"{workspace.training} holds no finished training; run draftsmith train with this recipe first")
    content = {name: value for file in files for name, value in json.loads(file.read_text(encoding="utf-8")).items()}
    if apart := sorted({one.name for one in fields(FitResult)} ^ content.keys()):
        raise UserError(f"{workspace.training} was left by another version of draftsmith (its results differ in "
                        f"{', '.join(apart)}); delete it to train anew, or choose another --out")
    content |= {"checkpoint": workspace.training / content["checkpoint"], "by_position": tuple(content["by_position"])}
    return FitResult(**content)


def built_module(workspace: Workspace) -> DraftModule:
    """A fresh module of the recipe's family and settings, with its drafter."""
    module = workspace.module()
    module.configure_model()
    return module


STAGES = (
    Stage(name="distill", title="the target answers prompts", work=distill_stage,
          sections=("target", "template", "prompts", "distill")),
    Stage(name="encode", title="its states are stored", sections=("batch", "model"), work=encode_stage),
    Stage(name="train", title="the drafter learns", sections=("batch", "model"), work=train_stage),
    Stage(name="artifact", title="the draft tree is fitted, the artifact written", sections=("tree",),
          work=artifact_stage),
    Stage(name="evaluate", title="held-out prompts are decoded", sections=("evaluate",), work=evaluate_stage),
)


def perform_stages(workspace: Workspace, chosen: Sequence[str]) -> None:
    """Run stages of a recipe; the first has nothing to do where the recipe names finished data."""
    if workspace.recipe.data is None:
        run_stages(workspace, STAGES, chosen, before=writer_digest(workspace))
    else:
        run_stages(workspace, STAGES[1:], chosen, before=workspace.borrowed())


def run(parsed: Parsed[Recipe]) -> None:
    """Do everything in one recipe, from prompts to the report; stages whose output is complete are skipped."""
    if (warning := busy_warning()) is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    perform_stages(Workspace(parsed.values, parsed.settings), [stage.name for stage in STAGES])


def distill_command(parsed: Parsed[Recipe]) -> None:
    """Let the target answer prompts, and store its states at every token where the recipe trains on stored states."""
    if parsed.values.data is not None:
        raise UserError(f"data names {parsed.values.data}, which is already distilled; leave data out to distil anew")
    perform_stages(Workspace(parsed.values, parsed.settings), ["distill", "encode"])


def train(parsed: Parsed[Recipe]) -> None:
    """Train a drafter on distilled data, fit its tree and write the artifact."""
    workspace = Workspace(parsed.values, parsed.settings)
    workspace.manifest()
    perform_stages(workspace, ["encode", "train", "artifact"])


COMMANDS: dict[str, Command[Any]] = {
    "run": Command(name="run", arguments=Recipe, run=run),
    "distill": Command(name="distill", arguments=Recipe, run=distill_command, home=("distill", DistillConfig)),
    "train": Command(name="train", arguments=Recipe, run=train, home=("model.config", TrainConfig)),
}
