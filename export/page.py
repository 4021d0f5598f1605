"""A page as data: headings, texts, tables and figures, built once and written as HTML, Markdown or plain text."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

WIDTH = 100  # Columns of a terminal
_COLOUR = re.compile(r"#([0-9a-f]{6})\b")
_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
                         trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


@dataclass(frozen=True)
class Heading:
    """A heading; the first one of a page is its title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; in Markdown it stands as it is, so that it may be a block of code."""

    text: str
    kind: str = ""  # headline, muted or lead, or a box: good or warn
    lead: str = ""  # Bold words before it
    items: tuple[str, ...] = ()  # A list after it


@dataclass(frozen=True)
class Cell:
    """One figure, its interval where it has one, and good or bad."""

    text: str
    interval: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Headings of columns, and rows as long; a row of one cell is a heading among them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    kind: str = ""  # cards: large figures with their meaning; facts: names with sentences; words: columns of those

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]]) -> "list[Table]":
        """The table of rows with their cells by the headings of the columns; none without rows."""
        return [cls([*rows[0]], [[*row.values()] for row in rows])] if rows else []

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows."""
        return [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in self.rows]


class Plot(str):
    """A plot as SVG, with the figure of matplotlib that it shows and its name."""

    name: str
    figure: Any

    @property
    def pixels(self) -> Any:
        """It as pixels [height, width, RGB], for what shows no SVG."""
        import numpy
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas: Any = FigureCanvasAgg(self.figure)
        canvas.draw()
        return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()


@dataclass(frozen=True)
class Figure:
    """A plot, which is drawn only for HTML and for loggers."""

    draw: Callable[[], Plot]
    caption: str


@dataclass(frozen=True)
class Passage:
    """A text whose tokens are marked, which only HTML shows: pieces of (text, guess, missed or nothing, a hint)."""

    pieces: Sequence[tuple[str, str, str]]
    heading: str = ""
    note: str = ""


Block = Heading | Text | Table | Figure | Passage


def as_html(page: Sequence[Block]) -> str:
    """The page in one file: no script, nothing fetched from anywhere."""
    # Figures that follow each other stand in pairs.
    groups = [(kind, list(blocks)) for kind, blocks in groupby(page, key=lambda one: type(one).__name__.lower())]
    title = next(one.text for one in page if isinstance(one, Heading))
    # Plots have colours that follow the page's, light or dark: variables, since the SVG inside it cannot know which one
    # the reader prefers.
    return _TEMPLATES.get_template("page.html.jinja").render(title=title, groups=groups, themed=lambda figure: Markup(
        _COLOUR.sub(r"var(--plot-\1, #\1)", figure.draw())))


def as_markdown(page: Iterable[Block]) -> str:
    """The page in Markdown."""
    parts: list[str] = []
    shown = [one for one in page if not isinstance(one, Figure | Passage)]
    for block, following in zip(shown, [*shown[1:], None], strict=True):
        # Of a section that has only figures nothing is left.
        if isinstance(block, Heading) and not isinstance(following, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Text):
            bold = block.lead or (block.text if block.kind == "headline" else "")
            said = [f"**{bold}**"] if bold else []
            said += [block.text] if block.text and block.text != bold else []
            parts += [" ".join(said)] if said else []
            parts += ["\n".join(f"* {one}" for one in block.items)] if block.items else []
        elif isinstance(block, Table):
            lines = [block.columns, ["---", *["--:" if block.kind == "" else "---"] * (len(block.columns) - 1)]]
            for row in block.cells:
                cells = [f"{one.text} ({one.interval})" if one.interval else one.text for one in row]
                # Markdown cannot join cells of a row, so a heading among the rows fills the rest with empty ones.
                lines.append(cells if len(cells) > 1 else [f"*{cells[0]}*", *[""] * (len(block.columns) - 1)])
            parts.append("\n".join(f"| {' | '.join(one.replace('|', chr(92) + '|') for one in line)} |"
                                   for line in lines))
    return "\n\n".join(parts) + "\n"


def as_text(page: Iterable[Block]) -> str:
    """The page for a terminal, `WIDTH` columns wide unless a name is long; intervals are left out."""
    parts: list[str] = []
    for block in page:
        if isinstance(block, Heading):
            parts.append(block.text)
        elif isinstance(block, Text):
            said = f"{block.lead} {block.text}".strip()
            parts.append("\n".join(line for one in (said, *block.items) for line in wrap(one, WIDTH)))
        elif isinstance(block, Table):
            rows = [list(block.columns), *([one.text for one in row] for row in block.cells)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            parts.append("\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
                                   for row in rows))
    return "\n\n".join(parts) + "\n"
