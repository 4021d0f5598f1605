"""Artifacts, checkpoint layouts of other projects, evaluation and its report."""

from .artifact import FORMAT_VERSION, Artifact, Tuning, load_artifact, read_description, save_artifact, save_tuning
from .evaluation.contention import busy_warning
from .evaluation.evaluate import evaluate
from .evaluation.methods import EvaluateConfig, Method, PromptSets, Question
from .evaluation.results import Evaluation, EvaluationRun, Lossless, Measures
from .evaluation.target_drift import Drift, measure_drift, with_drift
from .layouts.eagle import import_eagle
from .layouts.hydra import import_hydra
from .layouts.medusa import import_medusa
from .layouts.merged_target import export_adapted
from .layouts.registry import EVERY_FORMAT, FORMATS, export_artifact
from .report.markdown import terminal_table, write_report

__all__ = [
    "EVERY_FORMAT",
    "FORMATS",
    "FORMAT_VERSION",
    "Artifact",
    "Drift",
    "EvaluateConfig",
    "Evaluation",
    "EvaluationRun",
    "Lossless",
    "Measures",
    "Method",
    "PromptSets",
    "Question",
    "Tuning",
    "busy_warning",
    "evaluate",
    "export_adapted",
    "export_artifact",
    "import_eagle",
    "import_hydra",
    "import_medusa",
    "load_artifact",
    "measure_drift",
    "read_description",
    "save_artifact",
    "save_tuning",
    "terminal_table",
    "with_drift",
    "write_report",
]
