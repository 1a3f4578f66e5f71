"""The record of what was proven on every family of language models that transformers knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

State = Literal["proven", "refused", "not applicable", "not yet"]

_LETTERS: Mapping[str, State] = {"p": "proven", "r": "refused", "n": "not applicable", "y": "not yet"}


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
