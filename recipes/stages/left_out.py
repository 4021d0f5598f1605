"""Work that the stages before the evaluation left out for lack of minutes, and loops that training leaves out."""

from ...data import Manifest, TokenShard
from ...data.answers.data_folder import STATS
from ...data.batches.learned_tokens import count_repetitions
from ...modules.files.json_records import read_json, record_of
from .training_folder import read_result
from .workspace import Workspace


def left_out(workspace: Workspace) -> tuple[str, ...]:
    """A sentence for each such stage; empty where every stage did all that was planned."""
    return (*_answers(workspace), *_loops(workspace), *_training(workspace))


def _answers(workspace: Workspace) -> list[str]:
    """The answers that are missing, by the settings of the run that distilled them."""
    manifest = workspace.manifest()
    settings = manifest.recipe["distill"]
    wanted, minutes, found = (settings.get("budget_tokens"), settings.get("budget_minutes"),
                              manifest.total("train", "supervised"))
    if wanted is None or minutes is None or found >= wanted or not _ran_out(workspace, manifest, minutes):
        return []
    return [f"answers: {found:,} of {wanted:,} tokens were distilled; the rest did not fit into distill.budget_minutes "
            f"{minutes:g}"]


def _loops(workspace: Workspace) -> list[str]:
    """The repetitions that training leaves out."""
    manifest = workspace.manifest()
    found = count_repetitions([TokenShard.read(workspace.data / record.file, record.sha256)
                               for record in manifest.split("train")])
    if not found.answers:
        return []
    return [f"training text: {found.answers:,} of {manifest.total('train', 'answers'):,} answers end in a loop, whose "
            f"{found.tokens:,} repeated tokens of {manifest.total('train', 'supervised'):,} in all are not "
            "learned"]


def _ran_out(workspace: Workspace, manifest: Manifest, minutes: float) -> bool:
    """True if the time ended distillation, and not the last prompt of a file."""
    if manifest.recipe["prompts"].get("origin") == "own":
        return True
    file, remedy = workspace.data / STATS, "delete it, only times are lost"
    stats = record_of(dict[str, float], read_json(file, remedy), str(file), remedy) if file.is_file() else {}
    return stats.get("seconds", 0.0) >= 60 * minutes


def _training(workspace: Workspace) -> list[str]:
    config, result = workspace.recipe.train, read_result(workspace.training)
    if config.max_steps is None or config.max_minutes is None or result.steps >= config.max_steps:
        return []
    return [f"training: {result.steps:,} of {config.max_steps:,} steps; the rest did not fit into train.max_minutes "
            f"{config.max_minutes:g}"]
