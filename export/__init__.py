"""Artifacts, checkpoint layouts of other projects, evaluation and its report."""

from .acceptance_heads import StoredHead, save_head
from .artifact import Artifact, Drafting, load_artifact, save_artifact
from .engines.trial import Trial, TrialSettings, served, try_export
from .evaluation.contention import busy_warning, use_free_processors
from .evaluation.evaluate import evaluate
from .evaluation.methods import EvaluateConfig, Method, PromptSets, Question
from .evaluation.results import Evaluation, EvaluationRun, Lossless, Measures, TrainingRecord
from .evaluation.target_drift import Drift, measure_drift, with_drift
from .layouts.parts.export_format import ExportSettings, ImportSettings
from .layouts.registry import EVERY_FORMAT, export_artifact, import_drafter
from .report.evaluation_page import terminal_table, write_report
from .stored_drafter import FORMAT_VERSION, read_description
from .tuning import Tuning, save_tuning

__all__ = [
    "EVERY_FORMAT", "FORMAT_VERSION", "Artifact", "Drafting", "Drift", "EvaluateConfig", "Evaluation", "EvaluationRun",
    "ExportSettings", "ImportSettings", "Lossless", "Measures", "Method", "PromptSets", "Question", "StoredHead",
    "TrainingRecord", "Trial", "TrialSettings", "Tuning", "busy_warning", "evaluate", "export_artifact",
    "import_drafter", "load_artifact", "measure_drift", "read_description", "save_artifact", "save_head",
    "save_tuning", "served", "terminal_table", "try_export", "use_free_processors", "with_drift", "write_report",
]
