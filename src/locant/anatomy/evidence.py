"""The tensors of one forward, the model's modules to recompute them by hand, and how far an equation is from holding.

An error is relative and taken row by row (one position at a time): the first position often carries an activation a
hundred times larger than the rest, and one scale for all would hide every other row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from locant.address import Address
from locant.anatomy.anatomy import Anatomy, Move, Part
from locant.anatomy.facts import Facts
from locant.anatomy.formula import Named
from locant.anatomy.sites import Channels, wide

TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""The largest relative error of a row that counts as holding, by the dtype the model runs in."""


@dataclass(frozen=True, slots=True)
class Equation:
    """One instance of an identity: the points it is between, and how far it is from holding.

    Attributes:
        error: the largest relative error of a row; infinite where it cannot be computed at all.
        vacuous: it would hold whatever the tensors are (a zero-initialised projection).
    """

    members: frozenset[Address]
    error: float
    vacuous: bool = False


class Evidence:
    """What the identities of one layer (``None``: of the trunk) are measured on.

    Attributes:
        disturbed: the first residual of this forward was changed, so that it does not follow from the embeddings.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        tape: Mapping[Address, Tensor],
        ids: Tensor,
        module: Callable[[str], nn.Module],
        layer: int | None = None,
        disturbed: bool = False,
    ) -> None:
        self.anatomy = anatomy
        self.disturbed = disturbed
        self.ids = ids
        self.layer = layer
        self._tape = tape
        self._module = module

    def at(self, layer: int | None) -> Evidence:
        return Evidence(self.anatomy, self._tape, self.ids, self._module, layer, self.disturbed)

    @property
    def dtype(self) -> str:
        """What the model computes in, e.g. ``float32``."""
        kinds = (t.dtype for t in self._tape.values() if t.is_floating_point())
        return str(min(kinds, key=lambda kind: kind.itemsize)).removeprefix("torch.")

    @property
    def last(self) -> int:
        return self.anatomy.facts.n_layers - 1

    @property
    def facts(self) -> Facts:
        return self.anatomy.facts.at(self.layer)

    @property
    def part(self) -> Part:
        return self.anatomy.part(self.layer)

    def has(self, *names: str) -> bool:
        return all(self.address(name) in self._tape for name in names)

    def get(self, name: str) -> Tensor:
        return self._tape[self.address(name)]

    def by_head(self, name: str) -> Tensor:
        """``[batch, head, pos, d]``, at least float32."""
        heads = self.facts.n_heads if name[0] == "q" else self.facts.n_kv_heads
        return wide(self.get(name)).unflatten(-1, (heads or 1, -1)).transpose(1, 2)

    def output(self, path: str) -> Tensor | None:
        """A module's own output in this forward, if it was read."""
        return self._tape.get(Address.of_module(path))

    def address(self, name: str) -> Address:
        return self.part.aside(name) if name in self.part.beside else Address(name, self.layer)

    def plays(self, role: str) -> bool:
        return role in self.part.modules

    def channels(self, name: str) -> Channels | None:
        return self.part.sites[name].view.channels

    def call(self, role: str, *args: Any) -> Any:
        """Call by hand the module that plays `role` in this part, on the device it lives on."""
        return self.call_path(self.part.modules[role], *args)

    def call_path(self, path: str, *args: Any) -> Any:
        """Call the module at `path` by hand."""
        module = self._module(path)
        weight = next(module.parameters(), None)
        if weight is not None and weight.device.type != "meta":
            args = tuple(a.to(weight.device) if isinstance(a, Tensor) else a for a in args)
        result = module(*args)
        return result.to(self.ids.device) if isinstance(result, Tensor) else result

    def computed(self, point: str) -> Tensor:
        """What the formula of `point` gives for the points before it."""
        formula = self.part.formulas[point]

        def tensor(named: Named) -> Tensor:
            return self.weight(named.name) if named.weight else self.get(named.name)

        return tensor(formula) if isinstance(formula, Named) else formula.of(tensor)

    # ---- equations

    def equal(
        self, got: Tensor, want: Tensor, *names: str, others: tuple[Address, ...] = (), size: Tensor | None = None
    ) -> Equation:
        """`got` is `want`, relative to the largest value of each row of `want`, or to `size` ``[..., 1]``."""
        members = frozenset([*map(self.address, names), *others])
        if got.shape != want.shape:
            return Equation(members, float("inf"))
        a, b = wide(got), wide(want)
        scale = b.abs().amax(-1, keepdim=True) if size is None else size
        floor = (1e-4 * scale.max()).clamp_min(1e-30)
        return Equation(members, _finite(((a - b).abs() / scale.clamp_min(floor)).max()), bool(scale.max() == 0))

    def follows(self, total: str, start: str, moves: Sequence[Move]) -> Equation:
        """The residual `total` is what `moves` make of the residual `start`."""
        points = [m.name for m in moves if m.kind == "add" and m.name not in self.part.beside]
        first = next((i for i, m in enumerate(moves) if m.kind == "add"), len(moves))
        last = next((i for i in range(len(moves), first, -1) if moves[i - 1].kind == "add"), first)
        carried = self.moved(self.get(start), moves[:first])
        if any(m.kind != "add" for m in moves[first:last]) or moves[last:]:
            return self.equal(self.get(total), self.moved(carried, moves[first:]), total, start, *points)
        return self.summed(
            self.get(total), [carried, *(self.get(m.name) for m in moves[first:])], total, start, *points
        )

    def moved(self, value: Tensor, moves: Sequence[Move]) -> Tensor:
        """What `moves` make of a residual."""
        for move in moves:
            if move.kind == "add":
                value = value + self.get(move.name)
            elif move.kind == "norm":
                value = self.call_path(move.name, value)
            elif move.kind == "scale":
                value = value * move.factor
            elif move.kind == "bias":
                value = value + self.weight(move.name)
            else:
                value = value * self.weight(move.name)
        return value

    def weight(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        weight: Tensor = getattr(self._module(path), leaf)
        return weight.detach().to(self.ids.device)

    def summed(self, whole: Tensor, parts: Sequence[Tensor], *names: str) -> Equation:
        """`parts` add up to `whole`.

        Added in the model's own dtype they give `total` bit for bit, in some order, and that tells something as long
        as leaving one out would not. Where they do not, the error is relative to the smallest term, and a row counts
        only where that term stands out of the rounding of the sum; where none does, the identity proves nothing.
        """
        members = frozenset(map(self.address, names))
        if any(part.shape != whole.shape for part in parts):
            return Equation(members, float("inf"))
        orders = list(permutations(parts)) if len(parts) < 5 else [tuple(parts)]
        if any(torch.equal(sum(order[1:], order[0]), whole) for order in orders):
            idle = any(torch.equal(sum(order[1:-1], order[0]), whole) for order in orders)
            return Equation(members, 0.0, idle)
        stacked = torch.stack([wide(part) for part in parts])
        rest = (wide(whole) - stacked.sum(0)).abs().amax(-1)
        largest = torch.maximum(stacked.abs().amax(0), wide(whole).abs()).amax(-1)
        rounding = 4 * torch.finfo(whole.dtype).eps * largest
        smallest = stacked.abs().amax(-1).amin(0)
        excess = (rest - rounding).clamp_min(0)
        telling = smallest > 10 * rounding
        if not bool(telling.any()):
            trivial = bool((excess == 0).all())
            return Equation(members, 0.0 if trivial else float("inf"), trivial)
        return Equation(members, _finite((excess / smallest.clamp_min(1e-30))[telling].max()))

    def by_construction(self, equation: Equation) -> Equation:
        """The same equation where both its sides are read at one site, so that it proves nothing by holding."""
        return replace(equation, vacuous=True)

    def fails(self, *names: str) -> Equation:
        return Equation(frozenset(map(self.address, names)), float("inf"))


def _finite(error: Tensor) -> float:
    return float(error) if bool(torch.isfinite(error)) else float("inf")
