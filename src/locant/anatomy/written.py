"""Prove that a point can be written: write noise to it, and look at what the model makes of it.

Where a tensor can be read is often not where it can be changed: the skip connection keeps what the norm was handed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locant.address import Address, format_address
from locant.anatomy.anatomy import Anatomy
from locant.anatomy.evidence import TOLERANCE, Equation, Evidence
from locant.anatomy.proof import Verdict, measure
from locant.anatomy.sites import ModuleSite, Site, wide
from locant.points import POINTS

MASKED = -9e3
"""A score below this is masked, and stays so."""
_ORDER = {name: i for i, name in enumerate(POINTS)}


def write_sites(address: Address, site: Site) -> list[Site]:
    """Where a point that is read at `site` may be written, the likelier place first."""
    if address.name == "resid_mid" and isinstance(site, ModuleSite):
        return [replace(site, in_place=True), site]  # the skip connection holds the same tensor
    return [site]


def around(anatomy: Anatomy, address: Address) -> dict[Address, Site]:
    """What to read to judge a write: the points of its layer, of the trunk, and where the neighbours meet it."""
    last = anatomy.facts.n_layers - 1
    layers = {0, last} if address.layer is None else {address.layer}
    near = {layer + step for layer in layers for step in (-1, 0, 1) if 0 <= layer + step <= last}
    reads = {a: copy(site) for a in anatomy.addresses() if a.layer in near and (site := anatomy.site(a)) is not None}
    if layers & {0, last}:
        reads |= {Address(name): site for name, site in anatomy.trunk.sites.items()}
        reads |= dict(anatomy.extras())
    for layer in layers:
        part = anatomy.part(layer)
        reads |= {part.aside(name): site for name, site in part.beside.items()}
    return reads


def noise(value: Tensor) -> Tensor:
    """`value` with noise of half its size, in float32 and rounded once; masked scores as they are."""
    x = wide(value)
    seen = x > MASKED
    spread = torch.where(seen, x, torch.zeros_like(x)).std().clamp_min(1e-6)
    added = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x) * spread / 2
    return torch.where(seen, x + added, x).to(value.dtype)


@dataclass(frozen=True, slots=True)
class Trial:
    """One forward with a point written, beside one without.

    Attributes:
        wanted, got: what was written, and what a capture read there.
        verdicts: of the read proof; what it refuses is no evidence.
    """

    address: Address
    base: Evidence
    written: Evidence
    tapes: tuple[Mapping[Address, Tensor], Mapping[Address, Tensor]]
    wanted: Tensor
    got: Tensor
    verdicts: Mapping[Address, Verdict]

    def judge(self) -> Verdict:
        """Proven where a capture shows what was written, what is computed before is as it was, and every equation
        with something computed after holds for what was written.
        """
        tolerance = TOLERANCE[self.base.dtype]
        if (holder := self._holds_another()) is not None:
            return self._refused(f"what is written there is {format_address(holder)} too")
        error = self.base.equal(self.got, self.wanted).error
        if not error <= tolerance:
            return self._refused(f"a capture does not show what was written (relative error {error:.2g})")
        changed = next((a for a in self._before() if not self._differ(a) <= tolerance), None)
        if changed is not None:
            return self._refused(f"writing it changes {format_address(changed)}, which is computed before it")
        after = dict(self._after())
        if not after and self._something_follows():
            return self._refused("no identity of this model says what follows from it, so nothing proves a write")
        for name, equation in after.items():
            if not equation.error <= tolerance:
                return self._refused(
                    f"an identity does not hold for what was written: {name} (relative error {equation.error:.2g})"
                )
        return Verdict("proven", max([error, *(q.error for q in after.values())]), "", tuple(after))

    def _refused(self, reason: str) -> Verdict:
        return Verdict("refused", None, f"it cannot be written on this model: {reason}")

    @property
    def _whole(self) -> Address:
        """The point as the identities name it: no single stream, a stack as the residual it is, and a sublayer's
        output as what is added, where the two are one tensor.
        """
        name, sites = self.address.name, self.base.anatomy.part(self.address.layer).sites
        own, added = sites.get(name), sites.get(f"{name}_post")
        if isinstance(own, ModuleSite) and isinstance(added, ModuleSite) and own == replace(added, view=own.view):
            name = f"{name}_post"
        return Address("resid_post" if name == "resid_streams" else name, self.address.layer)

    def _before(self) -> Iterator[Address]:
        own = _rank(self._whole)
        known = (a for a in self.tapes[0] if a.point is not None and a in self.tapes[1])
        return (a for a in known if _rank(a) < own and a != self.address)

    def _differ(self, address: Address) -> float:
        before, after = (tape[address] for tape in self.tapes)
        return 0.0 if torch.equal(before, after) else self.base.equal(after, before).error

    def _holds_another(self) -> Address | None:
        """A point whose channels of the same projection are among those of this one."""
        anatomy = self.base.anatomy
        own = anatomy.site(self._whole)
        if not isinstance(own, ModuleSite):
            return None
        for name, site in anatomy.part(self.address.layer).sites.items():
            channels, mine = site.view.channels, own.view.channels
            same = replace(site, view=own.view) == own if isinstance(site, ModuleSite) else False
            if same and channels is not None and mine is None and name != self._whole.name:
                return Address(name, self.address.layer)
        return None

    def _after(self) -> Iterator[tuple[str, Equation]]:
        """The equations this point is in with one that is computed later."""
        own, anatomy = self._whole, self.base.anatomy
        found = False
        for layer in {None, own.layer, *([0, self.base.last] if own.layer is None else [])}:
            for identity in dict.fromkeys(i for name in anatomy.part(layer).sites for i in POINTS[name].proof):
                for equation in measure(identity, self.written.at(layer)):
                    if self._tells(equation):
                        found = True
                        yield f"{identity} of {'the trunk' if layer is None else f'layer {layer}'}", equation
        if found:
            return
        for address, tensor in self.tapes[0].items():  # what is the same tensor later must be so again
            same = address.point is not None and _rank(address) > _rank(own) and _equal(tensor, self.tapes[0].get(own))
            if same:
                yield str(address), self.base.equal(self.tapes[1][address], self.tapes[1][own])
                return

    def _tells(self, equation: Equation) -> bool:
        own = self._whole
        others = [a for a in equation.members if a != own and a.point is not None and a.name != "resid_streams"]
        later = [a for a in others if a.point and a.point.value == "float" and _rank(a) > _rank(own)]
        proven = all(self.verdicts[a].state != "refused" for a in others if a in self.verdicts)
        return own in equation.members and bool(later) and proven and not equation.vacuous

    def _something_follows(self) -> bool:
        trunk = self.base.anatomy.trunk.sites
        return self.address.layer is not None or self.address.name != list(trunk)[-1]


def _rank(address: Address) -> tuple[float, int]:
    """Where a point stands in a forward pass."""
    order = _ORDER[address.name]
    if address.layer is None:
        return (-1.0 if address.name == "embeddings" else float("inf")), order
    return address.layer, order


def _equal(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and torch.equal(a, b)
