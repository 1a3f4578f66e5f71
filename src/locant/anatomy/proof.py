"""Prove that a site holds the point it is named for: run the identities over one forward and judge each point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from locant.address import Address
from locant.anatomy.anatomy import Anatomy
from locant.anatomy.identities import IDENTITIES, Evidence, Measured
from locant.points import POINTS

Measure = Callable[[str, int | None], Measured | None]
State = Literal["proven", "refused", "vacuous"]

_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


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


def prove(anatomy: Anatomy, tape: Mapping[Address, Tensor], evidence: Evidence) -> dict[Address, Verdict]:
    """Judge every point that was found.

    Args:
        anatomy: where they were found.
        tape: the tensor at each site, read the way a capture reads it.
        evidence: the same tensors with the model's own modules to call by hand.
    """
    dtype = str(next(t.dtype for t in tape.values() if t.is_floating_point())).removeprefix("torch.")
    tolerance = _TOLERANCE.get(dtype, 3e-2)
    measured: dict[tuple[str, int | None], Measured | None] = {}

    def measure(name: str, layer: int | None) -> Measured | None:
        key = (name, layer)
        if key not in measured:
            identity = IDENTITIES[name]
            measured[key] = identity.measure(evidence, layer)
        return measured[key]

    return {address: _judge(address, measure, tolerance) for address in anatomy.addresses()}


def _judge(address: Address, measure: Measure, tolerance: float) -> Verdict:
    results: list[tuple[str, Measured]] = []
    for name in POINTS[address.name].proof:
        result = measure(name, address.layer)
        if result is not None and (not result.points or address.name in result.points):
            results.append((name, result))
    if not results:
        return Verdict("refused", None, "no identity of this model involves it, so nothing proves it")
    failed = [(n, r) for n, r in results if not r.error <= tolerance]
    names = tuple(n for n, _ in results)
    if failed:
        name, result = max(failed, key=lambda pair: pair[1].error)
        formula = IDENTITIES[name].formula
        reason = f"its identity {formula} fails on this model (relative error {result.error:.2g})"
        return Verdict("refused", result.error, reason, names)
    telling = [r for _, r in results if not r.vacuous]
    if not telling:
        return Verdict("vacuous", None, "its identities hold trivially on these weights and prove nothing", names)
    return Verdict("proven", max(r.error for r in telling), "", names)
