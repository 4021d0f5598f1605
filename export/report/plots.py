"""Plots of a report, each an SVG to put inside a page. matplotlib is imported only here."""

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ...modules import CostTable, MeasuredStep, Topology, UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e8ed"
DRAFTED, PLAIN, GENERATE, ACCENT = "#0f766e", "#a9b4c0", "#d3dae1", "#c2410c"
SERIES = (DRAFTED, "#4f63b6", ACCENT, "#8a5a9e", "#7a8a2b", "#b0417a", "#2f87b7", "#8a6a3f")
BASELINE_COLORS = {"this loop, no drafts": "#8794a2", "transformers generate": "#b9c3cd"}
"""Names and colours of the two baselines without drafts."""
TREE_ALONE = "expected speed-up, tree alone (right)"
Point = tuple[float, tuple[float, float] | None]
"""A value and its interval, where it has one."""
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font, can be searched, and keeps the file small
    "text.parse_math": False,  # names come from files: a dollar sign in one starts no formula
    "font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True, "legend.frameon": False,
}


def acceptance_by_position(curves: Mapping[str, Sequence[float]]) -> str:
    """Share of passes that accept at least 1, 2, 3 ... guesses; one line for each method or prompt set."""
    with _Plot(4.9, 3.1) as (axes, plot):
        longest = max((len(curve) for curve in curves.values()), default=1)
        for (name, curve), color in zip(curves.items(), cycle(SERIES), strict=False):
            axes.plot(range(1, len(curve) + 1), [100 * share for share in curve], "o-", color=color, label=name,
                      markersize=4)
        top = max((100 * share for curve in curves.values() for share in curve), default=100)
        axes.set(xlabel="guesses accepted, at least", ylabel="share of passes, %",
                 ylim=(0, min(100, 1.15 * top)), xticks=range(1, max(1, longest) + 1))
        axes.legend()
    return plot.svg("acceptance")


def accepted_length(lengths: Mapping[str, float], overall: float) -> str:
    """Tokens per target pass of each group as bars, with the overall figure as a line."""
    names = sorted(lengths, key=lambda name: lengths[name])
    with _Plot(4.9, 0.9 + 0.29 * max(2, len(names))) as (axes, plot):
        axes.barh(names, [lengths[name] for name in names], color=DRAFTED, height=0.62)
        for row, name in enumerate(names):
            axes.text(lengths[name] - 0.03, row, f"{lengths[name]:.2f}", va="center", ha="right", color="white",
                      fontsize=9)
        axes.axvline(overall, color=ACCENT, linewidth=1, zorder=0.5)
        axes.text(overall, len(names) - 0.35, f" all {overall:.2f}", color=ACCENT, fontsize=9, va="bottom")
        axes.set(xlabel="tokens per target pass", xlim=(0, 1.05 * max([1.0, *lengths.values()])))
        axes.grid(visible=False, axis="y")
    return plot.svg("length")


def accepted_lengths(methods: Mapping[str, Mapping[str, float]]) -> str:
    """Tokens per target pass of each group, a dot for each method, the groups in the order of the first one's."""
    first = next(iter(methods.values()))
    names = sorted(first, key=lambda name: first[name])
    with _Plot(4.9, 1.2 + 0.29 * max(2, len(names))) as (axes, plot):
        for (method, lengths), color in zip(methods.items(), cycle(SERIES), strict=False):
            axes.plot([lengths[name] for name in names], range(len(names)), "o", color=color, label=method)
        axes.set(xlabel="tokens per target pass", yticks=range(len(names)), yticklabels=names,
                 xlim=(0.95, None), ylim=(-0.6, len(names) - 0.4))
        plot.legend_above(len(methods))
    return plot.svg("lengths")


def with_ranges(lines: Mapping[str, Sequence[Point]], axis: str, places: Sequence[str], title: str, name: str, *,
                least: float = 0.0) -> str:
    """One line for each method over a few conditions, such as batch sizes, with intervals; baselines are grey.

    Args:
        lines: by method, (value, interval) at each condition.
        axis: label of the conditions' axis.
        places: the conditions.
        title: label of the values' axis.
        name: name of the figure.
        least: lower end of the values' axis.
    """
    with _Plot(4.9, 3.3) as (axes, plot):
        for number, (method, points) in enumerate(lines.items()):
            # Thin and grey, so that the eye goes to the methods and finds the baselines as a reference.
            color = BASELINE_COLORS.get(method, SERIES[number % len(SERIES)])
            width = 1.2 if method in BASELINE_COLORS else 1.8
            # Side by side, so that ranges do not cover each other.
            shift = 0.05 * (number - (len(lines) - 1) / 2)
            axes.plot([place + shift for place in range(len(points))], [value for value, _ in points], "o-",
                      color=color, label=method, linewidth=width, markersize=4)
            for place, (_, interval) in enumerate(points):
                if interval is not None:
                    axes.plot([place + shift] * 2, interval, "-", color=color, linewidth=width, alpha=0.55)
        axes.set(xlabel=axis, ylabel=title, xticks=range(len(places)), xticklabels=list(places), ylim=(least, None),
                 xlim=(-0.4, len(places) - 0.6))
        plot.legend_above(len(lines))
    return plot.svg(name)


def speeds(groups: Mapping[str, tuple[float, float, float]]) -> str:
    """Bars of (drafted, plain, generate) tokens per second for each prompt set."""
    with _Plot(4.9, 3.1) as (axes, plot):
        bars = (("with drafts", DRAFTED), ("this loop, no drafts", PLAIN), ("transformers generate", GENERATE))
        for bar, (label, color) in enumerate(bars):
            heights = [figures[bar] for figures in groups.values()]
            places = [place + 0.27 * (bar - 1) for place in range(len(groups))]
            axes.bar(places, heights, width=0.25, color=color, label=label)
            for place, height in zip(places, heights, strict=True):
                axes.text(place, height, f"{height:.1f}", ha="center", va="bottom", fontsize=9)
        top = max((max(figures) for figures in groups.values()), default=1.0)
        axes.set(ylabel="tokens per second, median", xticks=range(len(groups)), xticklabels=list(groups),
                 ylim=(0, 1.35 * top), xlim=(-0.6, len(groups) - 0.4))
        axes.grid(visible=False, axis="x")
        axes.legend(loc="upper left", fontsize=8.5, ncols=2)
    return plot.svg("speed")


def method_speeds(methods: Mapping[str, Point]) -> str:
    """Tokens per second of each method as bars with intervals; the baselines are grey."""
    names = sorted(methods, key=lambda name: methods[name][0])
    colors = dict(zip(methods, cycle(SERIES), strict=False)) | BASELINE_COLORS
    top = max(max(value, *(interval or ())) if interval else value for value, interval in methods.values())
    with _Plot(4.9, 0.9 + 0.32 * max(2, len(names))) as (axes, plot):
        for row, name in enumerate(names):
            value, interval = methods[name]
            axes.barh([row], [value], color=colors[name], height=0.6)
            if interval is not None:
                axes.plot(interval, [row] * 2, "-", color=INK, linewidth=1)
            axes.text((interval or (0, value))[1] + 0.015 * top, row, f"{value:.1f}", va="center", fontsize=9)
        axes.set(xlabel="tokens per second, median", yticks=range(len(names)), yticklabels=names,
                 xlim=(0, 1.15 * top))
        axes.grid(visible=False, axis="y")
    return plot.svg("speeds")


def cost_curve(cost: CostTable, tree_size: int, expected: Mapping[int, float]) -> str:
    """Milliseconds of a pass by the size of its tree and, if estimated, the expected speed-up of each size."""
    curve = cost.curve()
    sizes = curve.sizes
    with _Plot(4.9, 3.1) as (axes, plot):
        axes.plot(sizes, [1000 * s for s in curve.pass_seconds], "o-", color=MUTED, markersize=3, label="target pass")
        steps = map(sum, zip(curve.pass_seconds, curve.draft_seconds, strict=True))
        axes.plot(sizes, [1000 * s for s in steps], "o-", color=DRAFTED, markersize=3,
                  label="target pass and drafting")
        axes.axvline(tree_size, color=ACCENT, linewidth=1)
        axes.set(xlabel="nodes of the tree (tokens checked at once)", ylabel="milliseconds", ylim=(0, None))
        handles, labels = axes.get_legend_handles_labels()
        if expected:
            right = axes.twinx()
            known = sorted(expected)
            gains = [cost.predict(expected[size], size) for size in known]
            handles += right.plot(known, gains, "--", color=ACCENT, label=TREE_ALONE)
            right.set(ylabel="expected speed-up, tree alone", ylim=(0, 1.2 * max(gains)))
            right.grid(visible=False)
            labels.append(TREE_ALONE)
        axes.legend(handles, labels, loc="lower right", fontsize=8.5)
    return plot.svg("cost")


def training_lengths(curve: Sequence[MeasuredStep], best: int) -> str:
    """Tokens per pass of held-out text by training step, the best marked, and those expected on training text."""
    held_out = [(one.step, one.accepted_length) for one in curve]
    expected = [(one.step, one.expected_accepted_length) for one in curve if one.expected_accepted_length is not None]
    with _Plot(4.9, 3.3) as (axes, plot):
        axes.plot(*zip(*held_out, strict=True), "o-", color=DRAFTED, markersize=4, label="held-out text, decoded")
        if expected:
            axes.plot(*zip(*expected, strict=True), "o--", color=MUTED, markersize=3, label="training text, expected")
        axes.axvline(best, color=ACCENT, linewidth=1, zorder=0.5)
        # On the side of the line that has room.
        shift, side = (-4, "right") if 2 * best >= curve[-1].step else (4, "left")
        axes.annotate(f"best: {dict(held_out)[best]:.2f} at step {best:,}", (best, 1.0), xytext=(shift, 4), ha=side,
                      textcoords="offset points", color=ACCENT, fontsize=9)
        top = max(length for _, length in [*held_out, *expected])
        axes.set(xlabel="optimizer step", ylabel="tokens per pass", xlim=(0, None), ylim=(1.0, 1.0 + 1.1 * (top - 1.0)))
        plot.legend_above(2)
    return plot.svg("training")


def training_losses(curve: Sequence[MeasuredStep]) -> str:
    """Loss and accuracy on training text by training step."""
    with _Plot(4.9, 3.3) as (axes, plot):
        right = axes.twinx()
        for side, name, scale, color in ((axes, "loss", 1, INK), (right, "accuracy", 100, SERIES[1])):
            known = {one.step: scale * value for one in curve if (value := getattr(one, name)) is not None}
            side.plot(list(known), list(known.values()), "o-", color=color, markersize=4,
                      label=f"{name} (right)" if side is right else name)
            side.set(ylim=(0, 1.1 * max(known.values(), default=1.0)))
        axes.set(xlabel="optimizer step", ylabel="loss", xlim=(0, None))
        right.set(ylabel="first guesses that are right, %")
        right.grid(visible=False)
        plot.legend_above(2)
    return plot.svg("losses")


def tree(topology: Topology, used: int) -> str:
    """A static tree from left to right, coloured by rank of the guess; all but the first `used` nodes are faint."""
    height_of = _leaf_heights(topology)
    with _Plot(10.2, max(1.8, 0.9 + 0.17 * (max(height_of) + 1))) as (axes, plot):
        for node in range(topology.size - 1, 0, -1):
            parent, shown = topology.parents[node], node < used
            axes.plot([topology.depths[parent], topology.depths[node]], [height_of[parent], height_of[node]], "-",
                      color=GRID if not shown else "#b9c3cd", linewidth=1, zorder=1)
        for node in range(topology.size):
            color = INK if node == 0 else SERIES[min(topology.ranks[node], len(SERIES) - 1)]
            axes.scatter([topology.depths[node]], [height_of[node]], s=26, color=color if node < used else GRID,
                         zorder=2)
        axes.set(xlim=(-0.15, topology.depth + 0.15), xticks=range(topology.depth + 1), yticks=[],
                 xticklabels=["root", *(f"+{depth}" for depth in range(1, topology.depth + 1))])
        axes.set_ylim(max(height_of) + 0.8, -0.8)
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
        ranks = range(min(topology.width, len(SERIES)))
        for rank in ranks:
            label = f"guess {rank + 1}" + (" and later" if rank == len(SERIES) - 1 else "")
            axes.scatter([], [], s=26, color=SERIES[rank], label=label)
        if ranks:
            axes.legend(loc="lower left", ncols=len(SERIES), bbox_to_anchor=(0.0, 1.0), handletextpad=0.2)
    return plot.svg("tree")


def standings(rows: Mapping[str, tuple[float, float | None]]) -> str:
    """Tokens per pass of each draft as a bar and its speed-up as a dot on the same axis; 1 is the target alone."""
    names = list(rows)[::-1]
    with _Plot(6.4, 1.1 + 0.36 * max(2, len(names))) as (axes, plot):
        axes.barh(names, [rows[name][0] for name in names], color=DRAFTED, height=0.6, label="tokens per pass")
        for place, name in enumerate(names):
            length, speedup = rows[name]
            axes.text(length + 0.02, place, f"{length:.2f}", va="center", color=INK, fontsize=9)
            if speedup is not None:
                axes.plot(speedup, place, "o", color=ACCENT, markeredgecolor="white", markersize=8,
                          label="speed-up" if place == len(names) - 1 else None)
        axes.axvline(1.0, color=INK, linewidth=1)
        axes.set(xlim=(0, 1.15 * max((length for length, _ in rows.values()), default=1.0)))
        axes.grid(axis="y", visible=False)
        plot.legend_above(2)
    return plot.svg("standings")


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


class _Plot:
    """A figure of `width` by `height` inches with axes; drawing inside the block uses the style of the report."""

    def __init__(self, width: float, height: float) -> None:
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UserError("the HTML report needs matplotlib, which is not installed; pip install "
                            "'draftsmith[report]'") from error
        self._style = matplotlib.rc_context
        self._figure, self._size = Figure, (width, height)

    def __enter__(self) -> "tuple[Axes, _Plot]":
        self._context = self._style(_STYLE)
        self._context.__enter__()
        self.figure: Figure = self._figure(figsize=self._size, layout="constrained")
        return self.figure.add_subplot(), self

    def __exit__(self, *_error: object) -> None:
        self._context.__exit__(None, None, None)

    def legend_above(self, entries: int) -> None:
        """Put the legend in a line above the axes, where it covers nothing."""
        self.figure.legend(loc="outside upper left", ncols=min(3, entries), fontsize=8.5, handletextpad=0.3,
                           columnspacing=1.2)

    def svg(self, name: str) -> str:
        """SVG of the figure without its XML prologue; `name` keeps the ids of the figures on a page distinct."""
        # The salt replaces random ids, so that equal runs give equal pages.
        with self._style({**_STYLE, "svg.hashsalt": name}):
            buffer = io.StringIO()
            self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        return text[text.index("<svg") :]
