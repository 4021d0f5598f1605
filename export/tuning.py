"""tuning.json: measurements that one machine made with an artifact."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ..modules import (
    JOINED,
    NONE,
    SIZING_TEMPERATURE,
    STATIC,
    SURE_LENGTH,
    CopySizing,
    CopyTrial,
    CostModel,
    PassTrial,
    PredictedLengths,
    Target,
    choose_size,
    choose_trial,
)
from ..modules.files.atomic_files import write_file
from ..modules.files.json_records import read_record
from ..modules.target.linears.linear_forms import Packing
from .artifact_files import TUNING, as_json


class Copies(NamedTuple):
    """Sizes of the policy static+lookup for some rows."""

    tree_size: int
    """Nodes of the draft's tree, the root included."""
    trial: CopyTrial | None
    """The copied chain; None for plain decoding."""
    speedup: float | None
    """Predicted speed-up over plain decoding; None where the replays had another tree."""


def check_lengths(lengths: Sequence[float]) -> None:
    """Refuse expected tokens per pass that no pass can have: each emits the target's own token at least."""
    if (least := min(lengths, default=1.0)) < 1:
        raise ValueError(f"the lengths of expected_accepted_length must be at least 1, got {least}")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Figures that are predicted of decoding on this machine."""

    speedup: float
    """Speed-up over this loop without drafts."""
    accepted_length: float
    """Tokens per pass after that over the prompt, the bonus included."""
    length_error: float | None = None
    """Relative standard error of the tokens by the answers they were counted on; None where these chose the draft."""
    time_error: float = 0.0
    """Relative standard error of the speed-up by the seconds."""
    degrees: float = 1.0
    """Degrees of freedom of the error of the tokens."""
    answers: int = 0
    """Answers that the tokens were counted on."""

    def length_interval(self, measured: int) -> tuple[float, float] | None:
        """The 90 % interval of the tokens per pass of `measured` other answers to such prompts."""
        return self._interval(self.accepted_length, measured, 0.0)

    def speedup_interval(self, measured: int, speed: tuple[float, float] | None = None) -> tuple[float, float] | None:
        """The 90 % interval of their speed-up, of measured speeds that vary by this 95 % interval each."""
        error = 0.0 if speed is None else 2**0.5 * math.log(speed[1] / speed[0]) / (2 * 1.96)
        return self._interval(self.speedup, measured, math.hypot(self.time_error, error))

    def _interval(self, value: float, measured: int, error: float) -> tuple[float, float] | None:
        if self.length_error is None or not measured:
            return None
        # What is measured varies with its own answers too.
        spread = math.hypot(self.length_error * (1 + self.answers / measured) ** 0.5, error)
        # The 95 % quantile of Student's t by its expansion in 1 / degrees (Abramowitz and Stegun 1964, 26.7.5).
        degrees, normal = self.degrees, 1.645
        quantile = normal + (normal**3 + normal) / (4 * degrees) + (5 * normal**5 + 16 * normal**3 + 3 * normal) / (
            96 * degrees**2)
        return value * math.exp(-quantile * spread), value * math.exp(quantile * spread)


@dataclass(frozen=True, kw_only=True)
class SampledTuning:
    """Sizes for sampled rows, from held-out answers that were drawn at SIZING_TEMPERATURE."""

    expected_accepted_length: tuple[float, ...]
    """Expected tokens per pass for a tree of 1, 2, 3 ... nodes."""
    copying: CopySizing | None = None
    """Copied chains next to the tree for sampled rows; None when they were not replayed."""
    lookahead: tuple[PassTrial, ...] = ()
    """Replayed sizes of the policy sparse; empty for drafters without virtual nodes."""
    predicted: PredictedLengths | None = None
    """The lengths on answers that chose nothing; None where there were too few."""

    def __post_init__(self) -> None:
        check_lengths(self.expected_accepted_length)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Measurements of one machine; may be absent, and another machine makes its own."""

    device: str
    """Device the passes ran on, as text: "cpu, 2 threads"."""
    dtype: str
    """Number format of the target, such as float32."""
    tree_size: int
    """Nodes of the tree that decode one greedy row fastest here, root included; a prefix of the artifact's tree."""
    cost: CostModel
    """Seconds of target passes and of drafting, by the size of the tree, the batch and the context."""
    expected_accepted_length: tuple[float, ...] = ()
    """Estimated tokens per pass for a tree of 1, 2, 3 ... nodes, greedy; empty when it was not computed."""
    sampled: SampledTuning | None = None
    """The same for rows at temperatures above 0; None when it was not measured: such rows are then decoded plainly."""
    given: bool = False
    """Whether the recipe sets the size: every batch size and temperature then uses it, otherwise each has its own."""
    copying: CopySizing | None = None
    """Copied chains next to the tree, replayed on held-out answers; None when they were not."""
    linear_layers: Packing | None = None
    """Forms of the target's linear layers with which the seconds were measured, and why; None if not recorded."""
    predicted: PredictedLengths | None = None
    """The lengths on greedy answers that chose nothing; None where there were too few."""

    def __post_init__(self) -> None:
        if self.tree_size < 1:
            raise ValueError(f"tree_size must be at least 1, got {self.tree_size}")
        check_lengths(self.expected_accepted_length)

    @classmethod
    def of(cls, target: Target, tree_size: int, cost: CostModel, expected: Sequence[float] = (), *,
           given: bool = False) -> "Tuning":
        """The measurements made with `target`, with the name of its device."""
        # The time of a pass depends on the threads as much as on the device.
        count = torch.get_num_threads()
        threads = f", {count} thread{'s' * (count > 1)}" if target.device.type == "cpu" else ""
        return cls(device=f"{target.device.type}{threads}", dtype=str(target.dtype).removeprefix("torch."),
                   tree_size=tree_size, cost=cost, expected_accepted_length=tuple(expected), given=given,
                   linear_layers=target.linears.packing)

    def sampled_at(self, temperature: float) -> SampledTuning | None:
        """The sizes for sampled rows at a temperature; None above SIZING_TEMPERATURE, where less is accepted."""
        return self.sampled if 0 < temperature <= SIZING_TEMPERATURE else None

    def lengths_at(self, temperature: float) -> tuple[float, ...]:
        """Expected tokens per pass by size, as far as they are known for a temperature."""
        if temperature == 0:
            return self.expected_accepted_length
        sampled = self.sampled_at(temperature)
        return () if sampled is None else sampled.expected_accepted_length

    def predicted_at(self, temperature: float) -> PredictedLengths | None:
        """The lengths on answers that chose nothing, as far as they are known for a temperature."""
        sampled = self.sampled_at(temperature)
        return self.predicted if temperature == 0 else None if sampled is None else sampled.predicted

    def prediction(self, size: int, batch_size: int, temperature: float) -> Prediction | None:
        """The figures of a static tree of `size` nodes; None where no accepted length is known for it."""
        known, lengths = self.predicted_at(temperature), self.lengths_at(temperature)
        if known is not None and size <= len(known.lengths):
            length = known.lengths[size - 1]
            speedup = self.cost.answer_speedup(length, self.cost.step_seconds(size, batch_size), known.prompt_tokens,
                                               known.answer_tokens, batch_size)
            return Prediction(speedup=speedup, accepted_length=length, length_error=known.errors[size - 1],
                              degrees=known.degrees[size - 1], answers=known.answers,
                              time_error=self.cost.relative_error(size, batch_size) if size > 1 else 0.0)
        if size > len(lengths):
            return None
        return Prediction(speedup=self.cost.predict(lengths[size - 1], size, batch_size),
                          accepted_length=lengths[size - 1])

    def copying_prediction(self, batch_size: int, temperature: float) -> Prediction | None:
        """The figures of the policy static+lookup; None where none are known."""
        copies, known = self.copies(batch_size, temperature), self.predicted_at(temperature)
        if copies is None or copies.speedup is None:
            return None
        if copies.trial is None:
            return Prediction(speedup=1.0, accepted_length=1.0)
        sizing = self.copying_at(temperature)
        if known is None or sizing is None or copies.trial.predicted is None:
            return Prediction(speedup=copies.speedup, accepted_length=copies.trial.accepted_length)
        found = copies.trial.predicted
        seconds = sizing.seconds(replace(copies.trial, nodes=found.nodes), self.cost, batch_size)
        speedup = self.cost.answer_speedup(found.accepted_length, seconds, known.prompt_tokens, known.answer_tokens,
                                           batch_size)
        return Prediction(speedup=speedup, accepted_length=found.accepted_length, length_error=found.error,
                          degrees=found.degrees, answers=known.answers,
                          time_error=self.cost.relative_error(sizing.tree_size, batch_size))

    def copying_at(self, temperature: float) -> CopySizing | None:
        """The replays of copied chains that hold for a temperature."""
        if temperature == 0:
            return self.copying
        sampled = self.sampled_at(temperature)
        return None if sampled is None else sampled.copying

    def size_for(self, batch_size: int, temperature: float = 0.0) -> int:
        """Nodes of the tree that decode `batch_size` rows fastest: 1 where drafting is not known to pay."""
        lengths = self.lengths_at(temperature)
        # For one greedy row the size was chosen on measured passes; other rows are predicted by the cost model.
        if self.given or (temperature == 0 and (not lengths or batch_size == 1)):
            return self.tree_size
        return choose_size(lengths, self.cost.curve(batch_size)).size

    def copies(self, batch_size: int, temperature: float = 0.0) -> Copies | None:
        """Sizes of the policy static+lookup, of sampled rows with the replays' tree; None without replays."""
        if self.copying is None:
            return None
        known, size = self.copying_at(temperature), self.size_for(batch_size, temperature)
        # What another tree accepts next to copies is not known for sampled rows.
        if temperature > 0 and not self.given:
            best = None if known is None else known.best(self.cost, batch_size)
            kept = best is not None and self.cost.contended and best.accepted_length >= SURE_LENGTH
            if known is None or best is None or (known.speedup(best, self.cost, batch_size) <= 1 and not kept):
                return Copies(1, None, 1.0)
            size = known.tree_size
        sizing = known or self.copying
        trial = sizing.best(self.cost, batch_size)
        # The replays hold for their own tree alone.
        same = sizing is known and size == sizing.tree_size
        return Copies(size, trial, sizing.speedup(trial, self.cost, batch_size) if same else None)

    def pass_nodes(self, batch_size: int, temperature: float, virtual_nodes: int) -> int:
        """Nodes of a pass, virtual ones included, with which sampled rows decode fastest; 1 where none is known to pay.
        """
        # Without trials the choice is the root alone, which is plain decoding.
        sampled = self.sampled_at(temperature)
        return choose_trial(sampled.lookahead if sampled else (), self.cost.curve(batch_size), virtual_nodes).size

    def fastest(self, batch_size: int = 1, temperature: float = 0.0) -> str:
        """The policy that is predicted to decode such rows fastest, by the figures that are reported: static,
        static+lookup, or none."""
        size = self.size_for(batch_size, temperature)
        alone, both = self.prediction(size, batch_size, temperature), self.copying_prediction(batch_size, temperature)
        # A size whose accepted length is not known is predicted to gain nothing, so that copies win where they pay.
        speedups = {STATIC if size > 1 else NONE: 1.0 if alone is None else alone.speedup}
        if both is not None:
            speedups[JOINED] = both.speedup
        return max(speedups, key=lambda name: speedups[name])


def save_tuning(folder: Path, tuning: Tuning) -> Path:
    """Write or replace tuning.json of an artifact; returns its path."""
    return write_file(folder / TUNING, as_json(asdict(tuning)))


def read_tuning(folder: Path) -> Tuning | None:
    """tuning.json of an artifact; None if nothing was measured yet.

    Raises:
        UserError: if the file is damaged.
    """
    path = folder / TUNING
    if not path.is_file():
        return None
    return read_record(Tuning, path, "delete it, it will be measured again")
