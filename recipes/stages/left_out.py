"""Work that the stages before the evaluation left out for lack of minutes, and loops that training leaves out."""

from ...data import TokenShard
from ...data.answers.data_folder import STATS
from ...data.batches.learned_tokens import count_repetitions
from ...modules.files.json_records import read_json, record_of
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
            file, remedy = workspace.data / STATS, "delete it, only times are lost"
            stats = record_of(dict[str, float], read_json(file, remedy), str(file), remedy) if file.is_file() else {}
            ran_out = stats.get("seconds", 0.0) >= 60 * minutes
        if ran_out:
            sentences.append(f"answers: {found:,} of {wanted:,} tokens were distilled; the rest did not fit into "
                             f"distill.budget_minutes {minutes:g}")
    if manifest.skipped:
        sentences.append("prompts: rows were skipped, which data/skipped.jsonl lists: " + "; ".join(
            f"{count:,} × {kind}" for kind, count in manifest.skipped.items()))
    if manifest.repeated:
        sentences.append(f"prompts: {manifest.repeated:,} of {manifest.candidates:,} repeat others and were left out")
    repeated = count_repetitions([TokenShard.read(workspace.data / record.file, record.sha256)
                                  for record in manifest.split("train")])
    if repeated.answers:
        answers = manifest.total("train", "answers")
        sentences.append(f"training text: {repeated.answers:,} of {answers:,} answers end in a loop, whose "
                         f"{repeated.tokens:,} repeated tokens of {found:,} in all are not learned")
    steps = read_result(workspace.training).steps
    if config.max_steps is not None and config.max_minutes is not None and steps < config.max_steps:
        sentences.append(f"training: {steps:,} of {config.max_steps:,} steps; the rest did not fit into "
                         f"train.max_minutes {config.max_minutes:g}")
    return tuple(sentences)
