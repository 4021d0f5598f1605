"""Acceptance heads of the artifacts of an evaluation, with the figures that were stored when they were trained."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...modules import SamplingSetting
from ..acceptance_heads import HeadMeasurements
from ..artifact import Artifact
from .methods import EvaluateConfig


@dataclass(frozen=True, kw_only=True)
class MeasuredHead:
    """An acceptance head for the answers of an evaluation."""

    name: str
    """Name of its artifact in the report."""
    setting: SamplingSetting
    """The sampling that it is calibrated for."""
    threshold: float
    """Risk of a rejection above which drafting ends."""
    least: int
    """Tokens drafted whatever the risk."""
    most: int
    """Most tokens of a draft."""
    measurements: HeadMeasurements
    """Its figures."""


def measured_heads(artifacts: Mapping[str, Artifact], config: EvaluateConfig) -> tuple[MeasuredHead, ...]:
    """The heads that were measured for the sampling of an evaluation.

    Args:
        artifacts: by their names in the report.
        config: settings of the evaluation: a head for other temperatures or filters says nothing about its answers.
    """
    found = []
    for name, artifact in artifacts.items():
        for setting in map(config.sampling, config.degrees):
            head = artifact.heads.get(setting.temperature)
            if head is not None and head.setting == setting and head.measurements is not None:
                found.append(MeasuredHead(name=name, setting=setting, threshold=head.threshold, least=head.least,
                                          most=head.most, measurements=head.measurements))
    return tuple(found)
