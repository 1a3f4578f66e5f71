"""Write measured tables into benchmarks/README.md, between the marks that carry their name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

README = Path(__file__).with_name("README.md")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    rules = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rules, *rows])


def insert(name: str, text: str) -> None:
    """Replace what stands between the marks `name`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = README.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    README.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
