"""Tables and heat maps, styled and plain."""

import io
import re

import pytest
from rich.console import Console

from locant.cli.terminal import Column, Terminal, Tile, error_text

COLUMNS = [Column("name"), Column("count", right=True), Column("what it is", wraps=True)]
ROWS = [("a", "1", "one thing"), ("中文", "100", "a | b")]


def drawn(draw, *, styled: bool, width: int = 80, color_system: str | None = None) -> str:
    file = io.StringIO()
    draw(Terminal(Console(file=file, force_terminal=styled, width=width, color_system=color_system)))
    return file.getvalue()


def test_a_plain_table_is_markdown_with_aligned_columns():
    assert drawn(lambda t: t.table(COLUMNS, ROWS), styled=False, width=10) == (
        "| name | count | what it is |\n"
        "| ---- | ----: | ---------- |\n"
        "| a    |     1 | one thing  |\n"
        "| 中文 |   100 | a \\| b     |\n"
    )


def test_a_styled_table_wraps_only_its_last_column():
    assert drawn(lambda t: t.table(COLUMNS, ROWS), styled=True, width=20) == (
        "             what it\nname  count  is     \na         1  one    \n             thing  \n中文    100  a | b  \n"
    )


def test_square_brackets_are_no_markup():
    assert "[bold]" in drawn(lambda t: t.table([Column("x")], [("[bold]",)]), styled=True)
    assert "[bold]" in drawn(lambda t: t.line("[bold]"), styled=True)


def grid(terminal: Terminal) -> None:
    rows = [("1", [Tile("10", 1.0), Tile("2", 0.0, "中")]), ("0", [Tile("3", 0.5), Tile("4", 0.2)])]
    terminal.grid("layer", ["A", "B"], rows)


def test_a_grid_is_a_table_in_plain_text():
    assert drawn(grid, styled=False) == (
        "| layer |   A |    B |\n| ----: | --: | ---: |\n|     1 |  10 | 中 2 |\n|     0 |   3 |    4 |\n"
    )


def test_a_grid_has_tiles_of_one_width():
    assert drawn(grid, styled=True).splitlines() == ["layer     A     B ", "    1    10  中 2 ", "    0     3     4 "]


def test_a_grid_that_is_too_wide_goes_on_below():
    assert [line.split() for line in drawn(grid, styled=True, width=12).splitlines()] == [
        ["layer", "A"], ["1", "10"], ["0", "3"], ["layer", "B"], ["1", "中", "2"], ["0", "4"]
    ]  # fmt: skip


def test_a_tile_is_bluer_the_more_it_weighs():
    text = drawn(grid, styled=True, color_system="truecolor")
    assert text.index("48;2;8;48;150") < text.index("48;2;112;120;132") < text.index("48;2;60;84;141")


def test_a_terminal_of_few_colours_gets_steps_of_one_hue():
    tiles = [("0", [Tile(str(n), n / 5) for n in range(6)])]

    def grounds(colours: str) -> list[str]:
        text = drawn(lambda t: t.grid("", "abcdef", tiles), styled=True, color_system=colours)
        return re.findall(r"\x1b\[[\d;]*?;((?:48;5;\d+)|4\d|10\d)m", text)

    assert grounds("256") == [f"48;5;{step}" for step in (243, 60, 61, 19, 18, 18)]
    assert grounds("standard") == ["100", "100", "100", "44", "44", "44"]


@pytest.mark.parametrize(("error", "text"), [(None, ""), (0.0, "0"), (2.4e-7, "2e-07"), (float("inf"), "inf")])
def test_errors_are_short(error, text):
    assert error_text(error) == text


def test_json_has_a_line_per_entry_and_refuses_what_json_has_not():
    text = drawn(lambda t: t.json({"a": "é"}, rows=[{"b": 1}, {"b": None}], none=[]), styled=True)
    assert text == '{"a": "é",\n"rows": [\n  {"b": 1},\n  {"b": null}\n],\n"none": []}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        drawn(lambda t: t.json({"a": float("nan")}), styled=False)


def test_a_dumb_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not Terminal(Console(force_terminal=True)).styled
