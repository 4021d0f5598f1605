"""Work that the stages before the evaluation left out for lack of minutes, and loops that training leaves out."""

from ...data import TokenShard
from ...data.answers.data_folder import read_stats
from ...data.batches.learned_tokens import repetitions
from ...trainers.base import LEAST_STEPS
from .training_folder import read_result
from .workspace import Workspace


def left_out(workspace: Workspace) -> tuple[str, ...]:
    """A sentence for each such stage; empty where every stage did all that was planned."""
    manifest, config, sentences = workspace.manifest(), workspace.recipe.train, list[str]()
    # By the settings of the run that distilled the answers, which may be another one.
    settings, found = manifest.recipe["distill"], manifest.total("train", "supervised")
    wanted, minutes = settings.get("budget_tokens"), settings.get("budget_minutes")
    if wanted is not None and minutes is not None and found < wanted:
        ran_out = manifest.recipe["prompts"].get("origin") == "own"
        if not ran_out:
            # The last prompt of a file may have ended distillation, and not the time.
            ran_out = read_stats(workspace.data).get("seconds", 0.0) >= 60 * minutes
        if ran_out:
            sentences.append(f"answers: {found:,} of {wanted:,} tokens were distilled; the rest did not fit into "
                             f"distill.budget_minutes {minutes:g}")
    asked, held = settings.get("validation_prompts", 0), manifest.total("validation", "prompts")
    if minutes is not None and held < asked:
        sentences.append(f"held-out answers: {held:,} of {asked:,} validation prompts were answered; the rest did not "
                         f"fit into distill.budget_minutes {minutes:g}")
    if manifest.skipped:
        sentences.append("prompts: rows were skipped, which data/skipped.jsonl lists: " + "; ".join(
            f"{count:,} × {kind}" for kind, count in manifest.skipped.items()))
    sentences += [f"prompts: the chat template leaves out the {part} of {count:,} rows"
                  for part, count in manifest.unwritten.items()]
    if manifest.repeated:
        sentences.append(f"prompts: {manifest.repeated:,} of {manifest.candidates:,} repeat others and were left out")
    if (full := manifest.total("train", "full")) > 0:
        sentences.append(f"training text: {full:,} of {manifest.total('train', 'prompts'):,} conversations end early "
                         "because the target's context does")
    repeated = [stop - first for record in manifest.split("train") for _, first, stop in repetitions(
        TokenShard.read(workspace.data / record.file, record.sha256))]
    if repeated:
        answers = manifest.total("train", "answers")
        sentences.append(f"training text: {len(repeated):,} of {answers:,} answers end in a loop, whose "
                         f"{sum(repeated):,} repeated tokens of {found:,} in all are not learned")
    steps = read_result(workspace.training).steps
    most, minutes = config.max_steps, config.max_minutes
    if minutes is not None and (steps <= LEAST_STEPS if most is None else steps < most):
        done = f"{steps:,} steps, the fewest" if most is None else f"{steps:,} of {most:,} steps"
        sentences.append(f"training: {done}; the rest did not fit into train.max_minutes {minutes:g}")
    return tuple(sentences)
