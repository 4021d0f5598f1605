"""Artifacts, foreign layouts, evaluation and its report."""

from .artifact import FORMAT_VERSION, Artifact, Tuning, load_artifact, read_description, save_artifact, save_tuning
from .convert import FORMATS, export_artifact, import_medusa
from .drift import Drift, measure_drift, with_drift
from .eagle import import_eagle
from .evaluate import evaluate
from .hydra import import_hydra
from .merged import export_adapted
from .plan import EvaluateConfig, Method, PromptSets, Question
from .report import terminal_table, write_report
from .results import Evaluation, EvaluationRun, Lossless, Measures

__all__ = [
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
