"""Terminal: one output, styled for a person's terminal and plain for a file, a pipe or an issue.

Plain means Markdown: tables whose columns are aligned and never cut, headings with ``##``, commands in a
fenced block. Progress goes to stderr, and only to a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.color import Color
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

_GREY = (112, 120, 132)
_BLUE = (8, 48, 150)
_LADDER = (243, 60, 61, 19, 18)
_SHORT_LADDER = (8, 4)
_VISIBLE = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}

Cell = str | Text


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        right: numbers, which align at their end.
        style: how a terminal writes it.
        wraps: it gives way, over several lines, where the terminal is narrow; the others never do.
    """

    header: str
    right: bool = False
    style: str = ""
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """One cell of a grid: a number, a word before it, and from 0 to 1 how strongly it is coloured."""

    number: str
    weight: float
    word: str = ""

    def __str__(self) -> str:
        return f"{self.word} {self.number}".strip()


class Terminal:
    """Standard output, and the progress on standard error.

    Attributes:
        styled: a person is looking.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.styled = self.console.is_terminal and not self.console.is_dumb_terminal

    def line(self, text: Cell = "") -> None:
        """A line, or a paragraph that wraps."""
        self._show(Text(text) if isinstance(text, str) else text)

    def heading(self, text: str, note: str = "") -> None:
        """A title, and in one sentence what stands below it."""
        if not self.styled:
            self._write(f"\n## {text}\n\n" + (f"{note}\n\n" if note else ""))
            return
        self.console.print()
        self.console.print(Text(text, "bold"))
        if note:
            self.console.print(Text(note, "dim"))

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        """Rows under their columns."""
        if self.styled:
            self._show(_styled_table(columns, rows))
        else:
            self._write(_plain_table(columns, rows))

    def grid(self, corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Tile]]]) -> None:
        """A heat map with a number and perhaps a word in every tile; what does not fit in a line goes below."""
        if not self.styled:
            headers = [Column(corner, right=True), *(Column(name, right=True) for name in columns)]
            self._write(_plain_table(headers, [(name, *map(str, tiles)) for name, tiles in rows]))
            return
        colours = self.console.color_system
        label = max(_cells_wide(text) for text in (corner, *(name for name, _ in rows)))
        tile = max(_cells_wide(text) for text in (*columns, *(str(t) for _, tiles in rows for t in tiles))) + 2
        abreast = max(1, (self.console.width - label - 1) // tile)
        for start in range(0, len(columns), abreast):
            part = slice(start, start + abreast)
            head = "".join(f"{_right(name, tile - 1)} " for name in columns[part])
            self._unbroken(Text(f"{_right(corner, label)} {head}", "bold"))
            for name, tiles in rows:
                line = Text.assemble((_right(name, label), "bold"), " ")
                self._unbroken(line.append_text(Text("").join(_tile(t, tile, colours) for t in tiles[part])))

    def quote(self, text: str, style: str = "") -> None:
        """Words that are not the command's own, set in."""
        if self.styled:
            self.console.print(Padding(Text(text, style), (0, 0, 0, 2)))
        else:
            self._write(f"\n> {text}\n")

    def commands(self, commands: Sequence[tuple[str, str]]) -> None:
        """What to type next: each command below the sentence that says what it does."""
        if not self.styled:
            lines = [f"# {what}\n{command}\n" for what, command in commands]
            self._write("```sh\n" + "".join(lines) + "```\n")
            return
        for what, command in commands:
            self.console.print(Text(f"# {what}", "dim"))
            self._unbroken(Text(command, "cyan"))

    def json(self, about: Mapping[str, Any], **lists: Sequence[Mapping[str, Any]]) -> None:
        """One JSON object: `about`, then the lists with one line per entry."""
        parts = [f"{json.dumps(k)}: {_json(v)}" for k, v in about.items()]
        for name, rows in lists.items():
            parts.append(f"{json.dumps(name)}: {_json_list(rows)}")
        self._write("{" + ",\n".join(parts) + "}\n")

    def json_list(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One JSON list, one line per entry."""
        self._write(f"{_json_list(rows)}\n")

    def _show(self, drawn: RenderableType) -> None:
        if self.styled:
            self.console.print(drawn)
        else:
            self._write(f"{drawn.plain if isinstance(drawn, Text) else drawn}\n")

    def _unbroken(self, text: Text) -> None:
        """A line that the terminal may fold but locant does not, so that it can be copied whole."""
        self.console.print(text, soft_wrap=True)

    def _write(self, text: str) -> None:
        self.console.file.write(text)


@contextmanager
def progress(what: str) -> Generator[None]:
    """Say on stderr, where it is a terminal, what takes its time, and take it back when it is over."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    watched = sys.stderr.isatty() and console.is_interactive
    bar = Progress(*columns, console=console, transient=True, disable=not watched)
    with bar:
        bar.add_task(what, total=None)
        yield


def visible(token: str) -> str:
    """A token with its white space and control characters to be seen: ``␣France``."""
    shown = "".join(_VISIBLE.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}") for c in token)
    return shown or "∅"


def error_text(error: float | None) -> str:
    """A relative error: ``2e-07``, ``0`` where nothing differs, nothing where none was measured."""
    return "" if error is None else f"{error:.0e}" if error else "0"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _json_list(rows: Sequence[Mapping[str, Any]]) -> str:
    body = ",\n".join(f"  {_json(row)}" for row in rows)
    return f"[\n{body}\n]" if rows else "[]"


def _styled_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(column.header, justify=justify, style=column.style, no_wrap=not column.wraps, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def _tile(tile: Tile, width: int, colours: str | None) -> Text:
    """White on grey to blue, which reads alike on a dark and on a light ground, and in greyscale."""
    text = f" {tile.word}{_right(tile.number, width - 2 - _cells_wide(tile.word))} "
    return Text(text, Style(color="#ffffff", bgcolor=_ground(tile.weight, colours)))


def _ground(weight: float, colours: str | None) -> Color:
    """One hue, in as many steps as the terminal has colours for."""
    if colours == "truecolor":
        channels = (round(low + (high - low) * weight) for low, high in zip(_GREY, _BLUE, strict=True))
        return Color.from_rgb(*channels)
    ladder = _LADDER if colours == "256" else _SHORT_LADDER
    return Color.from_ansi(ladder[min(int(weight * len(ladder)), len(ladder) - 1)])


def _plain_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    cells = [[_plain(cell) for cell in row] for row in rows]
    headers = [column.header for column in columns]
    widths = [max(3, *(_cells_wide(r[i]) for r in [headers, *cells])) for i in range(len(columns))]
    rule = ["-" * (w - 1) + (":" if c.right else "-") for w, c in zip(widths, columns, strict=True)]
    lines = [headers, rule, *cells]
    return "".join(f"| {' | '.join(_padded(line, widths, columns))} |\n" for line in lines)


def _padded(row: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> Iterator[str]:
    for text, width, column in zip(row, widths, columns, strict=True):
        yield _right(text, width) if column.right else text + " " * (width - _cells_wide(text))


def _plain(cell: Cell) -> str:
    text = cell.plain if isinstance(cell, Text) else cell
    return text.replace("|", "\\|").replace("\n", " ")


def _right(text: str, width: int) -> str:
    return " " * (width - _cells_wide(text)) + text


def _cells_wide(text: str) -> int:
    return Text(text).cell_len
