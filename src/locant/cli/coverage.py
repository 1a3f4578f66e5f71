"""``locant families``: what was proven on every family of causal language models that transformers knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from locant.cli.terminal import Column, Terminal, error_text
from locant.errors import ModelError, did_you_mean
from locant.families import Coverage, Family

_STATES = (
    Column("point"),
    Column("state"),
    Column("error", right=True),
    Column("reason", style="dim", wraps=True),
)
_FAMILIES = (
    Column("family"),
    Column("proven", right=True),
    Column("refused", right=True),
    Column("which", style="dim", wraps=True),
)


def run(family: str | None, *, as_json: bool) -> None:
    """Print the record of one family, or of all.

    Raises:
        ModelError: there is no such family in it.
    """
    coverage = Coverage.recorded()
    if family is not None and family not in coverage.families:
        raise ModelError(
            f"{family}: no such family",
            has=f"{len(coverage.families)} families of transformers {coverage.versions['transformers']} were surveyed",
            instead=did_you_mean(family, coverage.families) or "locant families lists them",
        )
    wanted = list(coverage.families.values()) if family is None else [coverage.families[family]]
    terminal = Terminal()
    if as_json:
        terminal.json_list([_record(one) for one in wanted])
    elif family is None:
        _print_all(terminal, coverage, wanted)
    else:
        _print_one(terminal, coverage, wanted[0])


def _record(family: Family) -> dict[str, object]:
    points = {n: {"state": o.state, "error": o.error, "reason": o.reason} for n, o in family.points.items()}
    return {"family": family.name, "points": points}


def _print_all(terminal: Terminal, coverage: Coverage, families: Sequence[Family]) -> None:
    kinds = Counter(family.kind for family in families)
    told = f", {kinds['causal']} causal language models and {kinds['multimodal']} text towers of multimodal ones"
    terminal.line(Text.assemble((f"{len(families)} families", "bold cyan"), told))
    terminal.line(_versions(coverage))
    rows: list[tuple[str, ...]] = []
    for family in families:
        proven, refused, later = (family.named(state) for state in ("proven", "refused", "not yet"))
        reasons = {outcome.reason for outcome in family.points.values()}
        whole = reasons.pop() if len(reasons) == 1 else ", ".join(refused or later)
        rows.append((family.name, str(len(proven)), str(len(refused)), whole))
    terminal.table(_FAMILIES, rows)


def _print_one(terminal: Terminal, coverage: Coverage, family: Family) -> None:
    terminal.line(Text.assemble((family.name, "bold cyan"), f", {len(family.named('proven'))} points proven"))
    terminal.line(_versions(coverage))
    rows = [(name, o.state, error_text(o.error), o.reason) for name, o in family.points.items()]
    terminal.table(_STATES, rows)


def _versions(coverage: Coverage) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in coverage.versions.items())
    return f"Small models with random weights, surveyed with {versions}. Your own model: locant points MODEL"
