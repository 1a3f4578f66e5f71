"""``locant families``: what was proven on every family of causal language models that transformers knows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

from rich.text import Text

from locant.cli.terminal import Column, Terminal, error_text
from locant.errors import ModelError, did_you_mean

State = Literal["proven", "refused", "not applicable", "not yet"]

_LETTERS: Mapping[str, State] = {"p": "proven", "r": "refused", "n": "not applicable", "y": "not yet"}
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the survey of a small model of one family says of one point, over all its layers.

    Attributes:
        error: the largest relative error of the identities that prove it.
        reason: why it is not proven at every layer that has it.
    """

    state: State
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One family, ``family:variant`` for another layout of the same code.

    Attributes:
        kind: ``causal``, ``multimodal`` (the text tower), ``variant``, or ``other`` for one that does not run on
            text alone.
    """

    name: str
    kind: str
    points: Mapping[str, Outcome] = field(repr=False)

    def named(self, state: State) -> list[str]:
        """The points in this state."""
        return [name for name, outcome in self.points.items() if outcome.state == state]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The record of one survey of all families, and the versions it was made with."""

    versions: Mapping[str, str]
    families: Mapping[str, Family]

    @classmethod
    def recorded(cls) -> Coverage:
        """What was recorded when this version of locant was made."""
        return cls.parse(files("locant").joinpath("families.json").read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, text: str) -> Coverage:
        """The record of :meth:`text`."""
        raw = json.loads(text)
        families: dict[str, Family] = {}
        for name, entry in raw["families"].items():
            columns = zip(raw["points"], entry["states"], entry["errors"], entry["reasons"], strict=True)
            points = {p: Outcome(_LETTERS[letter], error, raw["reasons"][why]) for p, letter, error, why in columns}
            families[name] = Family(name, entry["kind"], points)
        return cls(raw["versions"], families)

    def text(self) -> str:
        """As it is kept: each reason once, each family on one line."""
        letters = {state: letter for letter, state in _LETTERS.items()}
        reasons = {"": 0}
        lines: list[str] = []
        for family in self.families.values():
            outcomes = family.points.values()
            entry = {
                "kind": family.kind,
                "states": "".join(letters[outcome.state] for outcome in outcomes),
                "errors": [outcome.error for outcome in outcomes],
                "reasons": [reasons.setdefault(outcome.reason, len(reasons)) for outcome in outcomes],
            }
            lines.append(f"{json.dumps(family.name)}: {json.dumps(entry, separators=(',', ':'))}")
        points = list(next(iter(self.families.values())).points)
        body = ",\n".join(lines)
        kept = ",\n".join(json.dumps(reason, ensure_ascii=False) for reason in reasons)
        return (
            f'{{"versions": {json.dumps(self.versions)},\n"points": {json.dumps(points)},\n'
            f'"reasons": [\n{kept}\n],\n"families": {{\n{body}\n}}}}\n'
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
