"""Plots of a report, each an SVG to put inside a page: lines, bars, or a tree. matplotlib is imported only here."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ...modules import CostTable, MeasuredStep, Topology, UserError
from ..page import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, BRANCH = "#1f2933", "#6b7785", "#e4e8ed", "#b9c3cd"
DRAFTED, ACCENT = "#0f766e", "#c2410c"
SERIES = (DRAFTED, "#4f63b6", ACCENT, "#8a5a9e", "#7a8a2b", "#b0417a", "#2f87b7", "#8a6a3f")
BASELINE_COLORS = {"this loop, no drafts": "#8794a2", "transformers generate": BRANCH}  # Those without drafts
Point = tuple[float, tuple[float, float] | None]  # A value and its interval, where it has one
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font, can be searched, and keeps the file small
    "text.parse_math": False,  # names come from files: a dollar sign in one starts no formula
    "font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True, "legend.frameon": False}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a plot, or only its points."""

    points: Sequence[tuple[float, float]]
    color: str
    label: str = ""
    style: str = "o-"
    size: int = 4
    width: float = 1.5
    right: bool = False  # Whether its values have the axis on the right


def lines(name: str, drawn: Sequence[Line], *, height: float = 3.3, mark: tuple[float, str] | None = None,
          right: Mapping[str, Any] | None = None, **axis: Any) -> Plot:
    """A plot of lines; `mark` is the place and label of a vertical one, `right` and `axis` are settings of the axes."""
    def draw(axes: "Axes") -> None:
        sides = {False: axes, True: axes.twinx() if right else axes}
        for one in drawn:
            sides[one.right].plot(*zip(*one.points, strict=True), one.style, color=one.color, markersize=one.size,
                                  label=one.label or None, linewidth=one.width)
        if mark is not None:
            axes.axvline(mark[0], color=ACCENT, linewidth=1, zorder=1, label=mark[1])
        if right:
            sides[True].set(**right)
            sides[True].grid(visible=False)
        axes.set(**axis)

    return _svg(name, draw, 4.9, height, [*(one.label for one in drawn if one.label), *([mark[1]] if mark else [])])


def bars(name: str, rows: Mapping[str, Mapping[str, Point]], axis: str, colors: Mapping[str, str], *, digits: int,
         mark: tuple[float, str] | None = None, dots: Mapping[str, float] | None = None, width: float = 4.9) -> Plot:
    """Horizontal bars: in each row one for each series, with its value and interval, in the series' colour or the
    row's; `mark` draws a vertical line with a word at it, `dots` a speed-up over the bar of a row."""
    known = [point for row in rows.values() for point in row.values()]
    top = max((max((value, *(interval or ()))) for value, interval in known), default=1.0)
    most = max(map(len, rows.values()), default=1)
    labels = [*dict.fromkeys(series for row in rows.values() for series in row if series), *["speed-up"] * bool(dots)]

    def draw(axes: "Axes") -> None:
        for place, row in enumerate(rows):
            for number, (series, (value, interval)) in enumerate(rows[row].items()):
                step = 0.8 / len(rows[row])
                middle = place + step * (number - (len(rows[row]) - 1) / 2)
                axes.barh([middle], [value], color=colors.get(series) or colors[row], height=0.92 * step,
                          label=series if place == 0 and series else None)
                if interval is not None:
                    axes.plot(interval, [middle] * 2, "-", color=INK, linewidth=1)
                axes.text((interval or (0, value))[1] + 0.015 * top, middle, f"{value:.{digits}f}", va="center",
                          fontsize=9)
        shown = [(speedup, place) for place, row in enumerate(rows) if (speedup := (dots or {}).get(row)) is not None]
        if shown:
            axes.plot(*zip(*shown, strict=True), "o", color=ACCENT, markeredgecolor="white", markersize=8,
                      label="speed-up")
        if mark is not None:
            axes.axvline(mark[0], color=ACCENT if mark[1] else INK, linewidth=1, zorder=0.5 if mark[1] else 2)
            axes.text(mark[0], -0.55, mark[1], color=ACCENT, fontsize=9)
        axes.set(xlabel=axis, yticks=range(len(rows)), yticklabels=list(rows), xlim=(0, 1.15 * top),
                 ylim=(max(1, len(rows)) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")

    return _svg(name, draw, width, 0.9 + 0.3 * max(2, len(rows) * (1 + 0.7 * (most - 1))) + 0.3 * bool(labels),
                labels)


def acceptance_by_position(curves: Mapping[str, Sequence[float]]) -> Plot:
    """Share of passes that accept at least 1, 2, 3 ... guesses; one line for each method or prompt set."""
    top = max((100 * share for curve in curves.values() for share in curve), default=100)
    return lines("acceptance", [
        Line(points=[(count, 100 * share) for count, share in enumerate(curve, 1)], color=color, label=name)
        for (name, curve), color in zip(curves.items(), cycle(SERIES), strict=False) if curve
    ], xlabel="guesses accepted, at least", ylabel="share of passes, %", ylim=(0, min(100, 1.15 * top)),
        xticks=range(1, max([1, *map(len, curves.values())]) + 1))


def accepted_lengths(methods: Mapping[str, Mapping[str, float]], overall: float) -> Plot:
    """Tokens per target pass of each group: bars for one method, with its overall figure, else dots for each one."""
    first = next(iter(methods.values()))
    names = sorted(first, key=lambda name: -first[name])
    if len(methods) == 1:
        return bars("length", {name: {"": (first[name], None)} for name in names}, "tokens per target pass",
                    {"": DRAFTED}, digits=2, mark=(overall, f" all {overall:.2f}"))
    return lines("lengths", [
        Line(points=[(lengths[name], place) for place, name in enumerate(names)], color=color, label=method, style="o",
             size=6) for (method, lengths), color in zip(methods.items(), cycle(SERIES), strict=False)
    ], height=1.2 + 0.29 * max(2, len(names)), xlabel="tokens per target pass", yticks=range(len(names)),
        yticklabels=names, xlim=(0.95, None), ylim=(len(names) - 0.4, -0.6))


def with_ranges(name: str, methods: Mapping[str, Sequence[Point]], places: Sequence[str], **axis: Any) -> Plot:
    """One line for each method over a few conditions, such as batch sizes, with intervals; baselines are grey."""
    drawn = []
    for number, (method, points) in enumerate(methods.items()):
        # Thin and grey, so that the eye goes to the methods and finds the baselines as a reference.
        color = BASELINE_COLORS.get(method, SERIES[number % len(SERIES)])
        width = 1.2 if method in BASELINE_COLORS else 1.8
        # Side by side, so that ranges do not cover each other.
        shift = 0.05 * (number - (len(methods) - 1) / 2)
        drawn.append(Line(points=[(place + shift, value) for place, (value, _) in enumerate(points)], color=color,
                          label=method, width=width))
        drawn += [Line(points=[(place + shift, end) for end in interval], color=color, width=width, style="-")
                  for place, (_, interval) in enumerate(points) if interval is not None]
    return lines(name, drawn, xticks=range(len(places)), xticklabels=list(places), xlim=(-0.4, len(places) - 0.6),
                 **axis)


def speeds(rows: Mapping[str, Mapping[str, Point]], methods: Sequence[str]) -> Plot:
    """Tokens per second as bars with intervals; methods have colours, the baselines are grey."""
    return bars("speeds", rows, "tokens per second, median", dict(zip(methods, cycle(SERIES), strict=False))
                | BASELINE_COLORS, digits=1)


def cost_curve(cost: CostTable, tree_size: int, expected: Mapping[int, float]) -> Plot:
    """Milliseconds of a pass by the size of its tree and, if estimated, the expected speed-up of each size."""
    curve = cost.curve()
    both = map(sum, zip(curve.pass_seconds, curve.draft_seconds, strict=True))
    drawn = [Line(points=[(size, 1000 * found) for size, found in zip(curve.sizes, seconds, strict=True)], color=color,
                  label=label, size=3)
             for label, seconds, color in (("target pass", curve.pass_seconds, MUTED),
                                           ("target pass and drafting", both, DRAFTED))]
    gains = [(size, cost.predict(expected[size], size)) for size in sorted(expected)]
    right = None
    if gains:
        drawn.append(Line(points=gains, color=ACCENT, label="expected speed-up (right)", style="--", right=True))
        right = {"ylabel": "expected speed-up, tree alone", "ylim": (0, 1.2 * max(gain for _, gain in gains))}
    return lines("cost", drawn, mark=(tree_size, "size of the tree"), right=right, ylabel="milliseconds",
                 xlabel="nodes of the tree (tokens checked at once)", ylim=(0, None))


def training_lengths(curve: Sequence[MeasuredStep], best: int) -> Plot:
    """Tokens per pass of held-out text by training step, the best marked, and those expected on training text."""
    held_out = [(float(one.step), one.accepted_length) for one in curve]
    expected = [(one.step, one.expected_accepted_length) for one in curve if one.expected_accepted_length is not None]
    drawn = [Line(points=held_out, color=DRAFTED, label="held-out text, decoded")]
    if expected:
        drawn.append(Line(points=expected, color=MUTED, label="training text, expected", style="o--", size=3))
    top = max(length for _, length in [*held_out, *expected])
    return lines("training", drawn, mark=(best, f"best: {dict(held_out)[best]:.2f} at step {best:,}"), xlim=(0, None),
                 xlabel="optimizer step", ylabel="tokens per pass", ylim=(1.0, 1.0 + 1.1 * (top - 1.0)))


def training_losses(curve: Sequence[MeasuredStep]) -> Plot:
    """Loss and accuracy on training text by training step."""
    losses = [(one.step, one.loss) for one in curve if one.loss is not None]
    shares = [(one.step, 100 * one.accuracy) for one in curve if one.accuracy is not None]
    drawn = [Line(points=losses, color=INK, label="loss")] if losses else []
    drawn += [Line(points=shares, color=SERIES[1], label="accuracy (right)", right=True)] if shares else []
    most, highest = (max((value for _, value in known), default=1.0) for known in (losses, shares))
    return lines("losses", drawn, xlabel="optimizer step", ylabel="loss", xlim=(0, None), ylim=(0, 1.1 * most),
                 right={"ylabel": "first guesses that are right, %", "ylim": (0, 1.1 * highest)})


def trimmed_lengths(sizes: Sequence[tuple[int, float, float]]) -> Plot:
    """Tokens per pass and coverage by the entries of a draft vocabulary."""
    top = max(length for _, length, _ in sizes)
    return lines("trimmed", [
        Line(points=[(entries, length) for entries, length, _ in sizes], color=DRAFTED, label="tokens per pass"),
        Line(points=[(entries, 100 * covered) for entries, _, covered in sizes], color=MUTED, style="o--", size=3,
             label="coverage (right)", right=True),
    ], xlabel="entries of the draft vocabulary", ylabel="tokens per pass", xscale="log",
        ylim=(1.0, 1.0 + 1.1 * (top - 1.0)), xticks=[entries for entries, *_ in sizes],
        xticklabels=[f"{entries:,}" for entries, *_ in sizes],
        right={"ylabel": "tokens of held-out answers, %", "ylim": (0, 105)})


def standings(rows: Mapping[str, tuple[float, float | None]]) -> Plot:
    """Tokens per pass of each draft as a bar and its speed-up as a dot on the same axis; 1 is the target alone."""
    return bars("standings", {name: {"tokens per pass": (length, None)} for name, (length, _) in rows.items()}, "",
                {"tokens per pass": DRAFTED}, digits=2, mark=(1.0, ""), width=6.4,
                dots={name: speedup for name, (_, speedup) in rows.items() if speedup is not None})


def tree(topology: Topology, used: int) -> Plot:
    """A static tree from left to right, coloured by rank of the guess; all but the first `used` nodes are faint."""
    height_of = _leaf_heights(topology)
    labels = [f"guess {rank + 1}" + (" and later" if rank == len(SERIES) - 1 else "")
              for rank in range(min(topology.width, len(SERIES)))]

    def draw(axes: "Axes") -> None:
        for node in range(topology.size - 1, 0, -1):
            parent = topology.parents[node]
            axes.plot([topology.depths[parent], topology.depths[node]], [height_of[parent], height_of[node]], "-",
                      color=BRANCH if node < used else GRID, linewidth=1, zorder=1)
        for node in range(topology.size):
            color = INK if node == 0 else SERIES[min(topology.ranks[node], len(SERIES) - 1)]
            axes.scatter([topology.depths[node]], [height_of[node]], s=26, color=color if node < used else GRID,
                         zorder=2)
        for label, color in zip(labels, SERIES, strict=False):
            axes.scatter([], [], s=26, color=color, label=label)
        axes.set(xlim=(-0.15, topology.depth + 0.15), xticks=range(topology.depth + 1), yticks=[],
                 xticklabels=["root", *(f"+{depth}" for depth in range(1, topology.depth + 1))],
                 ylim=(max(height_of) + 0.8, -0.8))
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)

    return _svg("tree", draw, 10.2, max(1.8, 0.9 + 0.17 * (max(height_of) + 1)), labels)


def _leaf_heights(topology: Topology) -> list[float]:
    """Height of every node: leaves one below the other, depth first; parents level with their first child."""
    children: list[list[int]] = [[] for _ in range(topology.size)]
    for node, parent in enumerate(topology.parents[1:], start=1):
        children[parent].append(node)
    heights = [0.0] * topology.size
    free, waiting = 0, [0]
    # A stack, not recursion: a tree may be a chain of hundreds of nodes.
    while waiting:
        node = waiting.pop()
        heights[node] = free
        free += not children[node]
        waiting += sorted(children[node], key=lambda child: -topology.ranks[child])
    return heights


def _svg(name: str, draw: "Callable[[Axes], None]", width: float, height: float, labels: Sequence[str]) -> Plot:
    """The figure that `draw` draws, of so many inches and without its XML prologue, with a legend of its labels above
    it, where that covers nothing. The name keeps the ids of the figures on a page distinct."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("the HTML report needs matplotlib, which is not installed; pip install "
                        "'draftsmith[report]'") from error
    # The salt replaces random ids, so that equal runs give equal pages.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, buffer = Figure(figsize=(width, height), layout="constrained"), io.StringIO()
        draw(figure.add_subplot())
        if labels:
            # About 14 letters of this size fit into an inch, and a handle takes five.
            columns = max(1, min(len(labels), int(14 * width) // (5 + max(map(len, labels)))))
            figure.legend(loc="outside upper left", ncols=columns, fontsize=8.5, handletextpad=0.3, columnspacing=1.2)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    plot = Plot(text[text.index("<svg"):])
    plot.name, plot.figure = name, figure
    return plot
