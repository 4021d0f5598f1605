"""Artifacts, checkpoint layouts of other projects, evaluation and its report."""

from .acceptance_heads import StoredHead, save_head
from .artifact import Artifact, Drafting, load_artifact, save_artifact
from .evaluation.contention import busy_warning, use_free_processors
from .evaluation.engine_trial import Trial, TrialSettings, served, try_export
from .evaluation.evaluate import evaluate, measure_drift
from .evaluation.methods import EvaluateConfig, Method, PromptSets, Question
from .evaluation.results import Evaluation, EvaluationRun, Lossless, Measures, TrainingRecord
from .layouts.parts.export_format import ExportSettings, ImportSettings
from .layouts.registry import EVERY_FORMAT, export_artifact, import_drafter
from .measured_files import Tuning, save_tuning
from .report.evaluation_page import terminal_table, write_report
from .stored_drafter import FORMAT_VERSION, read_description

__all__ = [
    "EVERY_FORMAT", "FORMAT_VERSION", "Artifact", "Drafting", "EvaluateConfig", "Evaluation", "EvaluationRun",
    "ExportSettings", "ImportSettings", "Lossless", "Measures", "Method", "PromptSets", "Question", "StoredHead",
    "TrainingRecord", "Trial", "TrialSettings", "Tuning", "busy_warning", "evaluate", "export_artifact",
    "import_drafter", "load_artifact", "measure_drift", "read_description", "save_artifact", "save_head",
    "save_tuning", "served", "terminal_table", "try_export", "use_free_processors", "write_report",
]
