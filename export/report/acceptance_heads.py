"""Acceptance heads in a report: their calibration, and their drafted tokens against rules that need no training."""

from ...modules import ConfidenceBin, ConfidenceCurve
from ...modules.tuning.drafted_tokens import HEAD, NAMES
from ..acceptance_heads import HeadMeasurements
from ..evaluation.methods import MeasuredHead
from .phrases import calibrated, number, percent
from .tables import Cell, Table, bin_edges

HEADS_NOTE = (
    "Measured by draftsmith specdec, on whole drafts after prompts that neither the drafter nor the head was trained "
    "on. Every rule stops these drafts where it would have stopped them, with the threshold that gives the accepted "
    "length of the row, or mixing two. q is the draft's own probability of a token, max q that of the likeliest one, "
    "the product that of the whole draft: rules that need no training. \"Before\" drops an unsure token, \"after\" "
    "keeps it. The figures are expected values, without intervals."
)
"""Explanation of the figures of acceptance heads."""
RELIABILITY_NOTE = (
    "The head's estimate of the probability that the target accepts a drafted token, against the share that it "
    "accepted. Under the diagonal drafts end too late, above it too early. Bars: the tokens of"
)
"""Explanation of the plot of reliability, before the name of a head."""


def title(head: MeasuredHead) -> str:
    """Heading of a head: its artifact, the sampling that it is for, and its rule."""
    return (f"{head.name}, {head.setting}: drafts of {head.least} to {head.most} tokens end at a risk above "
            f"{head.threshold:g}")


def head_verdicts(found: HeadMeasurements) -> list[str]:
    """Sentences: how well calibrated a head is, what it drafts, and whether a rule without training drafts fewer."""
    curve, row = found.calibration, found.policy
    listed = ", ".join(f"{name} {number(row.by_rule[name], 2)}" for name in NAMES if name != HEAD)
    # Rules that cannot reach the head's accepted length are not compared.
    known = {name: tokens for name, tokens in row.by_rule.items() if tokens is not None}
    head = known.pop(HEAD)
    shares = {name: percent(abs(known[name] / head - 1)) for name in sorted(known, key=lambda name: known[name])}
    # A rule without training wins a tie: it costs nothing.
    winners = [f"{name} drafts {share} fewer tokens than the head" for name, share in shares.items()
               if known[name] <= head]
    best = next(iter(shares), None)
    winner = ("No rule without training reaches that length." if best is None else
              f"Without training one does better: {', '.join(winners)}." if winners else
              f"The head does best: of the rules without training {best} drafts fewest, {shares[best]} more tokens.")
    return [
        f"Of {curve.guesses:,} tokens in {found.drafts:,} drafts of {found.length} the head expected "
        f"{curve.mean_confidence:.1%} to be accepted, {curve.acceptance_rate:.1%} were: on average it is "
        f"{calibrated(curve)}. Expected calibration error {curve.expected_calibration_error:.3f}, "
        f"{found.calibration_error_unweighted:.3f} without the weights of its loss.",
        f"By its own policy a pass drafts {number(row.by_rule[HEAD], 2)} tokens for an expected accepted length of "
        f"{row.expected_accepted_length:.2f}; for the same length: {listed}.",
        winner,
    ]


def drafted_table(found: HeadMeasurements) -> Table:
    """Drafted tokens of each rule: at the accepted length of the head's policy, then at those of fixed numbers."""
    ends = [(f"{found.policy.expected_accepted_length:.2f} (the head's own policy)", found.policy)]
    ends += [(f"{row.expected_accepted_length:.2f}", row) for row in found.fixed]
    return Table(("expected accepted length", *NAMES), tuple(
        (Cell(label), *(Cell(number(row.by_rule[name], 2)) for name in NAMES)) for label, row in ends))


def reliability_table(found: HeadMeasurements) -> Table:
    """Tokens, mean estimate and share accepted, of all and in each bin of the estimate."""
    curve = found.calibration
    groups: tuple[ConfidenceCurve | ConfidenceBin, ...] = (curve, *curve.bins)
    return Table(("", "all", *bin_edges(curve)), (
        (Cell("tokens"), *(Cell(f"{one.guesses:,}") for one in groups)),
        (Cell("mean estimate"), *(Cell(percent(one.mean_confidence)) for one in groups)),
        (Cell("accepted"), *(Cell(percent(one.acceptance_rate)) for one in groups)),
    ))
