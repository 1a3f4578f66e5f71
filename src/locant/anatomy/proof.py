"""Prove that a site holds the point it is named for: measure the identities on one forward, and judge each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from locant.address import Address, format_address
from locant.anatomy.evidence import TOLERANCE, Equation, Evidence
from locant.anatomy.identities import IDENTITIES
from locant.anatomy.structure import CALL_ERRORS
from locant.points import POINTS

State = Literal["proven", "refused", "vacuous"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the identities say of one point of one layer.

    Attributes:
        error: the largest relative error among them, row by row.
        reason: for a point that is not proven, which identity fails and by how much.
        identities: the ones that were measured.
    """

    state: State
    error: float | None = None
    reason: str = ""
    identities: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.state if self.error is None else f"{self.state} ({self.error:.0e})"


def prove(evidence: Evidence, disturbed: Evidence | None = None) -> dict[Address, Verdict]:
    """Judge every point of an anatomy on one forward, read the way a capture reads it.

    A point is proven when each identity that POINTS asks of it holds, with partners that are not refused
    themselves: two tensors read at wrong places may well agree with each other.

    Args:
        evidence: every point as one forward of the model gave it.
        disturbed: the same of a forward whose first residual was changed, where the model's own makes identities
            trivial (streams that are all alike cannot show how they are mixed).
    """
    addresses = list(evidence.anatomy.addresses())
    tolerance = TOLERANCE[evidence.dtype]
    measured: dict[tuple[str, int | None], list[Equation]] = {}
    asked: dict[Address, list[tuple[str, Equation]]] = {}
    for address in addresses:
        for name in POINTS[address.name].proof:
            key = (name, address.layer)
            if key not in measured:
                measured[key] = [q for e in (evidence, disturbed) if e for q in measure(name, e.at(address.layer))]
            asked.setdefault(address, []).extend((name, q) for q in measured[key] if address in q.members)
    verdicts = {address: _judge(asked.get(address, []), tolerance) for address in addresses}
    return _doubt(verdicts, asked)


def measure(name: str, evidence: Evidence) -> list[Equation]:
    """The instances of one identity; one that cannot even be computed fails."""
    try:
        return IDENTITIES[name].measure(evidence)
    except CALL_ERRORS:
        involved = [a for a in map(evidence.address, _having(name, evidence.layer)) if evidence.has(a.name)]
        return [Equation(frozenset(involved), float("inf"))]


def _having(identity: str, layer: int | None) -> list[str]:
    scope = "trunk" if layer is None else "block"
    return [point.name for point in POINTS.values() if identity in point.proof and point.scope == scope]


def _judge(equations: Sequence[tuple[str, Equation]], tolerance: float) -> Verdict:
    if not equations:
        return Verdict("refused", None, "no identity of this model involves it, so nothing proves it")
    names = tuple(dict.fromkeys(name for name, _ in equations))
    name, worst = max(equations, key=lambda pair: pair[1].error)
    if not worst.error <= tolerance:
        reason = f"its identity {IDENTITIES[name].formula} fails on this model (relative error {worst.error:.2g})"
        return Verdict("refused", worst.error, reason, names)
    if all(equation.vacuous for _, equation in equations):
        return Verdict("vacuous", None, "its identities hold trivially on these weights and prove nothing", names)
    return Verdict("proven", worst.error, "", names)


def _doubt(
    verdicts: dict[Address, Verdict], asked: Mapping[Address, Sequence[tuple[str, Equation]]]
) -> dict[Address, Verdict]:
    """Refuse what rests on a refused point, until nothing more falls."""
    falling = True
    while falling:
        falling = False
        for address, verdict in verdicts.items():
            if verdict.state != "proven":
                continue
            for name, equation in asked[address]:
                rotten = next((p for p in _doubtful(name, equation, address) if _refused(verdicts, p)), None)
                if rotten is not None:
                    reason = (
                        f"its identity {IDENTITIES[name].formula} rests on {format_address(rotten)}, which is refused"
                    )
                    verdicts[address] = Verdict("refused", verdict.error, reason, verdict.identities)
                    falling = True
                    break
    return verdicts


def _doubtful(identity: str, equation: Equation, address: Address) -> list[Address]:
    """The partners of `address` whose refusal is its own."""
    names = IDENTITIES[identity].doubt_from
    return [p for p in sorted(equation.members) if p != address and (names is None or p.name in names)]


def _refused(verdicts: Mapping[Address, Verdict], address: Address) -> bool:
    return address in verdicts and verdicts[address].state == "refused"
