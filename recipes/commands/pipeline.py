"""The commands that make an artifact, run, distill and train: each performs some of the same five stages, in order."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...data import Manifest, WantedStates, read_held_out
from ...data.answers.distill_task import require_enough
from ...data.answers.shard_queue import QUEUE
from ...data.datamodule import BatchConfig, DraftDataModule, HeldOutRows
from ...data.state_engines import engine_at, probe
from ...data.store.feature_store import Encoding, require_room
from ...data.store.token_store import MANIFEST, coverage
from ...export import Method, evaluate, load_artifact, save_artifact, save_tuning
from ...export.evaluation.contention import busy_warning, use_free_processors
from ...export.measured_files import chain_measurements, described, save_acceptance
from ...export.report.evaluation_page import terminal_table, write_report
from ...export.stored_drafter import CONFIG, HEADS, read_description
from ...modules import Features, UserError, answered_anew
from ...modules.features import ReadRows
from ...modules.files.folders import sole_writer
from ...modules.files.json_records import shortened
from ...modules.processes import ALONE, Processes, local_rank
from ...modules.target.loading.loading import device_named
from ...modules.tuning.tree_search import held_out_acceptance, ranked_text
from ...modules.tuning.trials import SIZING_TEMPERATURE
from ...trainers import DraftModule, FitResult, fit
from ...trainers.train_config import UNDECISIVE
from ..chat_settings import HANDWRITTEN, AskedSets, read_sets
from ..reading.command_line import Command, Parsed
from ..recipe import Recipe
from ..stages import training_folder
from ..stages.answer_workers import answers, help_to_answer, is_shared, leading, on_own_device, require_teacher
from ..stages.finished_draft import searched, sizes_in_words, tuned
from ..stages.records import STAGES_FILE, Stage, run_stages
from ..stages.workspace import Workspace, target_files
from ..terminal import say, stage_line

ALL = ("distill", "encode", "train", "artifact", "evaluate")  # Names of the stages, in order
NO_ORIGIN = ("out", "data", "references", "evaluate")  # Recipe keys that say nothing about how an artifact was made


def distill_stage(workspace: Workspace, more: Sequence[WantedStates] = ()) -> Sequence[Path]:
    """Prompts are answered by the target, or by whoever else writes the training rows; the states of what it decodes
    are stored for this recipe's training and for `more`."""
    workspace.check()
    training_folder.refuse_growth(workspace, workspace.training)
    recipe = workspace.recipe
    require_enough(recipe.prompts, recipe.distill)
    workspace.require_askable()
    wanted = [*workspace.wanted_states(), *more]
    if wanted and (tokens := missing_tokens(workspace)):
        # A full disk is reported now, and not after hours. The states of the prompts come on top; what several
        # trainings share is counted once, for the one that reads most.
        needed = max(one.bytes(tokens, workspace.target) for one in wanted)
        say(f"     {require_room(workspace.data, needed, f'the states of {tokens:,} answer tokens')}")
    manifest = answers(workspace, wanted)
    held_out = [] if manifest.held_out is None else [manifest.held_out.file]
    files = ["manifest.json", *held_out, *(shard.file for shard in manifest.shards)]
    return [workspace.data / file for file in files]


def missing_tokens(workspace: Workspace) -> int:
    """Answer tokens that data lack of their budget when a run starts or lets them grow; 0 without a budget."""
    budget, data = workspace.recipe.distill.budget_tokens, workspace.data
    ended = workspace.answered_data is not None and not workspace.raised_limits
    # Part of an interrupted queue's states is on disk, and all of them had room when it was started.
    if budget is None or ended or (data / QUEUE).is_dir():
        return 0
    held = Manifest.load(data).total("train", "supervised") if (data / MANIFEST).is_file() else 0
    return max(budget - held, 0)


def encode_stage(workspace: Workspace) -> Sequence[Path]:
    """The target's states at every token that have not been stored while it decoded are computed and stored, unless the
    recipe has them computed in the training step. A reduced draft vocabulary is chosen by them."""
    workspace.check()
    if workspace.manifest().template_hash != workspace.template.hash:
        raise UserError(f"the data in {workspace.data} was rendered with another chat template or other settings of "
                        "it; set template as the run that distilled it did, or leave data out to distil anew")
    files = stored_states(workspace)
    # Once, before training starts further processes.
    if workspace.tried.draft_ids_Q is not None and (ids_Q := workspace.recipe.module(
            workspace.target, workspace.label_weights).draft_ids_Q) is not None:
        say(f"     draft vocabulary of {len(ids_Q):,} tokens: {coverage(workspace.data, ids_Q):.1%} of the tokens of "
            "held-out answers")
    return files


def stored_states(workspace: Workspace) -> Sequence[Path]:
    """The files with the states that training reads from disk, complete."""
    if workspace.batch.states == "computed":
        say("     nothing to store: batch.states is computed")
        return []
    module = workspace.tried
    if not module.needs_states:
        say("     nothing to store: training reads tokens alone")
        return []
    place = workspace.recipe.distill.states_from
    engine = None if place is None else engine_at(place, workspace.target)
    encoding = Encoding(workspace.target, workspace.data, module.drafter.taps, form=workspace.batch.states_format,
                        read=engine)
    if encoding.tokens:
        say(f"     {require_room(workspace.data, encoding.bytes, f'the states of {encoding.tokens:,} tokens')}")
    else:
        say("     nothing to compute: all of them were stored before, while the answers were decoded or by another run")
    if engine is not None and encoding.tokens:
        say(f"     {engine.place} gives them; at a few rows they are the target's own {probe(engine, encoding)}")
    return encoding.run()


def train_stage(workspace: Workspace) -> Sequence[Path]:
    """The drafter is trained; the checkpoint with the greatest decoded accepted length is kept."""
    if workspace.recipe.train.max_minutes is not None:
        # Minutes are for steps. Without them a run can be repeated to the byte, and threads change the last digits.
        use_free_processors()
    workspace.check()
    workspace.require_askable(read_held_out(workspace.data))
    training_folder.check_settings(workspace)
    module = workspace.module()
    if workspace.manifest().total("train", "by_draft"):
        require_teacher(module)
    if module.start is not None:
        # A recipe that sets a family's default and one that leaves it out are the same: the line shows what was kept.
        asked = asdict(workspace.recipe.train.drafter)
        kept = [f"{name} {shortened(value)}" for name, value in asdict(module.config.drafter).items()
                if value != asked[name]]
        say(f"     continues the drafter in {workspace.recipe.train.start}, with its {', '.join(kept) or 'settings'}")
    data = DraftDataModule(workspace.data, batch_config(workspace, module), module.drafter.taps,
                           workspace.around_prompts)
    result = fit(module, data, workspace.training, facts=training_folder.facts(workspace))
    if module.global_rank != 0:
        # This process was started for the training alone: the first one goes on.
        raise SystemExit(0)
    record = training_folder.recorded(workspace, result)
    say(f"     {record.time}\n     {record.outcome}")
    return training_folder.write_result(workspace.training, result)


def batch_config(workspace: Workspace, module: DraftModule) -> BatchConfig:
    """Settings of the batches that a module trains on; without stored states where its training reads none."""
    config = workspace.batch
    return config if module.needs_states else replace(config, states="computed")


def held_out_rows(workspace: Workspace, module: DraftModule) -> HeldOutRows:
    """The held-out conversations of a run; stored states are those that the module's drafter reads."""
    return HeldOutRows(workspace.data, batch_config(workspace, module), module.drafter.taps)


def artifact_stage(workspace: Workspace) -> Sequence[Path]:
    """The tree is searched on held-out text, the artifact written, and the best size of the tree measured here."""
    result, module = training_folder.read_result(workspace.training), workspace.module()
    module.restore(load_file(result.checkpoint))
    rows, config = held_out_rows(workspace, module), workspace.recipe.tree
    with workspace.target.reproducible(), torch.no_grad():
        # Copies and deep trees that pay in a loop alone would be chosen for all text, so answers end where their
        # start. How long drafts are inside of loops is measured apart.
        target, held_out = module.verifier(encoded(workspace, module, rows.up_to_repetitions()))
        loops: dict[str, Any] = {"answers": len(rows.repeating())}
        if loops["answers"]:
            _, answers = module.verifier(encoded(workspace, module, rows.repeating()))
            found = held_out_acceptance(module.drafter.eval(), answers, workspace.recipe.train.validation_nodes)
            loops["accepted_length"] = found.accepted_length
            say(f"     {len(answers)} held-out answers end in a loop: {found.accepted_length:.2f} tokens per pass "
                "there")
    draft = searched(module.drafter, target, held_out, config.searched_nodes)
    with target.reproducible(), torch.no_grad():
        unread = rows.unread()[: (len(held_out) + 1) // 2]
        unread = (encoded(workspace, module, unread) if target is module.target else answered_anew(target, unread))
        unseen_text = ranked_text(draft.drafter, unread)
    facts = {**provenance(workspace, result, draft.expected), "loops": loops}
    if (ids_Q := module.drafter.token_ids_Q) is not None:
        facts["draft_vocabulary"] = {"tokens": len(ids_Q), "held_out_coverage": coverage(workspace.data, ids_Q)}
    # Saved as trained: what measured above was rounded to the target's number format.
    save_artifact(workspace.artifact, module.drafter, workspace.target.identity, facts, draft.topology, module.adapter,
                  chain_measurements(unseen_text))
    files = [workspace.artifact / name for name in ("config.json", "model.safetensors", "README.md")]
    if target.placement.slow:
        say(f"     tree of {draft.topology.size} nodes; no size of it is measured here: the target's layers are on "
            "disk")
        return files
    # A changed copy of the target was made inside the block: it is measured in the forms that decoding runs.
    target.linears.use(workspace.target.linears.packing)
    # Not before: the tree is repeated to the byte.
    use_free_processors()
    drawn = rows.whole(SIZING_TEMPERATURE)
    # A target that training has changed draws other answers than the stored ones.
    drawn = (encoded(workspace, module, drawn) if target is module.target
             else answered_anew(target, drawn, temperature=SIZING_TEMPERATURE))
    tuning = tuned(draft, target, held_out, unread, drawn, config, workspace.recipe.evaluate.max_new_tokens)
    save_tuning(workspace.artifact, tuning)
    for sentence in sizes_in_words(tuning, draft.topology):
        say(f"     {sentence}")
    return [*files, workspace.artifact / "tuning.json"]


def encoded(workspace: Workspace, module: DraftModule, rows: ReadRows) -> ReadRows:
    """Rows with the target's states, on its device: stored ones, or computed whenever a row is read."""
    target, taps = workspace.target, module.drafter.taps

    def read(row: Features) -> Features:
        moved = row.to(target.device)
        return moved if moved.final_BLD is not None else target.encode(moved, taps)

    return rows.mapped(read)


def provenance(workspace: Workspace, result: FitResult, expected: tuple[float, ...]) -> dict[str, Any]:
    """Origin of the artifact: nothing in it depends on the machine."""
    settings = {name: value for name, value in workspace.settings.items() if name not in NO_ORIGIN}
    trained = {name: value for name, value in settings["train"].items() if name not in UNDECISIVE}
    continued: dict[str, Any] = {}
    if workspace.recipe.train.start is not None:
        start, target = read_description(Path(workspace.recipe.train.start)), workspace.target.identity
        former = {} if start["target"]["weights_hash"] == target.weights_hash else {"target": start["target"]}
        continued["start"] = {"weights_sha256": start["weights_sha256"], **former,
                              "accepted_length": result.curve[0].accepted_length}
    return {
        **continued,
        "recipe": {**settings, "distill": workspace.decisive["distill"], "train": trained,
                   "batch": {**settings["batch"], "states": workspace.batch.states}},
        "data_manifest": training_folder.trained_on(workspace.training),
        "acceptance": {"accepted_length": result.accepted_length, "by_position": list(result.by_position)},
        "training": {"best_step": result.step, "steps": result.steps},
        "expected_accepted_length": list(expected),
    }


def evaluate_stage(workspace: Workspace) -> Sequence[Path]:
    """Held-out and hand-written prompts are decoded with the artifact and by the target alone."""
    use_free_processors()
    artifact = load_artifact(workspace.artifact, workspace.target, trust=workspace.recipe.trust)
    config = workspace.recipe.evaluate
    questions, origins = AskedSets.of(config, read_held_out(workspace.data)).questions(
        workspace.template, config, artifact.target.context_length, [artifact.drafter])
    methods = Method.each(artifact, config, say=stage_line)
    result = evaluate(artifact.target, methods, questions, config, references=workspace.recipe.references,
                      origins=origins, original=None if artifact.adapter is None else workspace.target, say=stage_line)
    trained = training_folder.recorded(workspace, training_folder.read_result(workspace.training))
    result = replace(result, left_out=(*training_folder.left_out(workspace), *result.left_out), training=trained)
    written = write_report(workspace.out, result, artifact)
    records = [record for one in result.evaluations for record in one.acceptance]
    save_acceptance(workspace.artifact, described(read_description(workspace.artifact)), records)
    say(f"\n{terminal_table(result)}\n{written['html']} shows it with plots")
    training_folder.log_evaluation(workspace, result, artifact)
    return list(written.values())


def stages(workspace: Workspace, more: Sequence[WantedStates] = ()) -> tuple[Stage, ...]:
    """The stages of a run, in order; the first stores `more` states for other trainings on the same data."""
    trained_by, recipe = ("family", "drafter", "train"), workspace.recipe
    answered = {**(target := target_files(recipe.target, recipe.template)),
                "prompts": [Path(recipe.prompts.path)] if recipe.prompts.path else [],
                "distill.draft": [Path(one) / CONFIG for one in (recipe.distill.draft,) if one]}
    return (
        Stage(name="distill", title="the target answers prompts", work=partial(distill_stage, workspace, more),
              sections=("target", "template", "prompts", "distill"), reads=answered),
        Stage(name="encode", title="the target's states are stored", work=partial(encode_stage, workspace),
              sections=("batch", *trained_by), reads=target),
        Stage(name="train", title="the drafter is trained", work=partial(train_stage, workspace), together=True,
              sections=("batch", *trained_by)),
        Stage(name="artifact", title="the draft tree is searched, the artifact written", sections=("tree",),
              work=partial(artifact_stage, workspace)),
        Stage(name="evaluate", title="held-out prompts are decoded", sections=("evaluate",),
              work=partial(evaluate_stage, workspace),
              reads={"the hand-written prompts": [HANDWRITTEN], "acceptance heads": [workspace.artifact / HEADS],
                     **read_sets(recipe.evaluate)}),
    )


def perform_stages(workspace: Workspace, chosen: Sequence[str] | None = None) -> None:
    """Run stages of a recipe, all by default; see `performed`."""
    with performed(workspace, chosen):
        return


@contextmanager
def performed(workspace: Workspace, chosen: Sequence[str] | None = None,
              more: Sequence[WantedStates] = ()) -> Iterator[bool]:
    """Context after stages of a recipe, all by default; the first one is left out where the recipe names finished data.

    Of several processes that answer together, all but the first end after that. Several processes that torchrun has
    started train together: the stages before that must be complete; those after it are done by the first one, unless
    its part of the target is of no use without the others. No other process works in the run's folder until the end of
    the block, or it raises UserError. Gives whether this process leads, and goes on."""
    # Before the folder of the run has any file.
    device_named(workspace.recipe.target.device)
    names = list(chosen or (ALL if workspace.recipe.data is None else ALL[1:]))
    # Lightning starts this command again for other devices: these join the training of the process that leads.
    joins = ("train" in names and (local_rank() > 0 or Processes.launched().world > 1)
             and workspace.answered_data is not None)
    together = "distill" in names and is_shared(workspace.recipe) and not joins
    with ExitStack() as stack:
        if together:
            workspace = on_own_device(workspace)
            if not stack.enter_context(leading(workspace.out)):
                help_to_answer(workspace, [*workspace.wanted_states(), *more])
                yield False
                return
        # Of those that train together, the first one keeps others out for all.
        if together or not (local_rank() or Processes.launched().rank):
            stack.enter_context(sole_writer(workspace.out / STAGES_FILE, wait=False))
        _perform(workspace, names, more)
        yield True


def _perform(workspace: Workspace, names: list[str], more: Sequence[WantedStates]) -> None:
    """Run stages in this process, the leading one of those that answer together."""
    every, before = stages(workspace, more), ""
    if workspace.recipe.data is not None:
        every, before = every[1:], workspace.data_identity()
    processes = Processes.launched()
    answered_together = workspace.data if is_shared(workspace.recipe) else None
    workspace.trains, workspace.evaluates = "train" in names, "evaluate" in names
    if workspace.trains:
        training_folder.refuse_other_run(workspace)
    if answered_together is not None and not workspace.trains:
        # Those that answer together have a queue, and end when it is empty.
        processes = ALONE
    alone = names.index("train") + 1 if processes.world > 1 and workspace.trains else len(names)
    run_stages(workspace.out, workspace.decisive, every, names[:alone], before, processes, answered_together)
    if processes.rank or alone == len(names):
        return
    if workspace.placement.shared:
        # The others have ended, and with them their parts of the target.
        say(f"     trained; for the stages {' and '.join(names[alone:])} start draftsmith run with this recipe again, "
            "without torchrun, a large target with --target.placement layers")
        return
    run_stages(workspace.out, workspace.decisive, every, names[alone:], before)


def run(parsed: Parsed[Recipe]) -> None:
    """Everything in one recipe, from prompts to the report; stages whose output is complete are skipped."""
    if not (local_rank() or Processes.launched().rank) and (warning := busy_warning()) is not None:
        say(f"warning: {warning}", file=sys.stderr)
    perform_stages(Workspace(parsed))


def distill_command(parsed: Parsed[Recipe]) -> None:
    """The target answers prompts, and its states are stored at every token where the recipe trains on stored states."""
    if parsed.values.data is not None:
        raise UserError(f"distill makes new data, and data names {parsed.values.data}; leave data out")
    perform_stages(Workspace(parsed), ["distill", "encode"])


def train(parsed: Parsed[Recipe]) -> None:
    """A drafter is trained on distilled data, its tree searched and the artifact written."""
    workspace = Workspace(parsed)
    workspace.manifest()
    perform_stages(workspace, ["encode", "train", "artifact"])


COMMANDS: dict[str, Command[Any]] = {
    "run": Command(name="run", arguments=Recipe, run=run, trains=True),
    "distill": Command(name="distill", arguments=Recipe, run=distill_command, home="distill", trains=True),
    "train": Command(name="train", arguments=Recipe, run=train, home="train", trains=True),
}
