"""Edit: a change to one named tensor. Where it is, at which of its numbers, and what becomes of them.

An operation is arithmetic on the vectors that `Where` picks: the last axis of a point, or the chosen heads and neurons
of it side by side. It is handed them in float32 or wider, and its result is rounded to the model's dtype once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from locant.address import Address, AddressLike, to_address
from locant.errors import EditError

Number = int | float


@dataclass(frozen=True, slots=True)
class Where:
    """Which numbers of a point an edit changes; by default all of them. Padding is never changed.

    Attributes:
        prompts: of the batch, by index.
        positions: absolute positions of each prompt; a negative one counts from that prompt's own end. Of an attention
            matrix they are the query positions.
        except_positions: positions to leave as they are, counted the same way.
        special_tokens: whether positions that hold one of the tokenizer's special tokens are changed.
        heads: of a point with heads; those of the keys and values where the point is theirs.
        neurons: of the last axis; within each head, of a point with heads.
        keys: of an attention matrix, the positions that are attended to. What the model masks stays masked.
    """

    prompts: int | Sequence[int] | None = None
    positions: int | Sequence[int] | None = None
    except_positions: int | Sequence[int] | None = None
    special_tokens: bool = True
    heads: int | Sequence[int] | None = None
    neurons: int | Sequence[int] | None = None
    keys: int | Sequence[int] | None = None


class Operation:
    """What becomes of the vectors an edit changes.

    A tensor of an operation is ``[width]``, the same for every position, or ``[prompts, positions, width]``, one for
    each; there, a single prompt or position stands for all of them.
    """

    directions: ClassVar[tuple[str, ...]] = ()
    _vectors: ClassVar[tuple[str, ...]] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The new vectors ``[..., width]`` of the old ones, both in float32 or wider."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the operation, by the name of the argument."""
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}  # type: ignore[arg-type]

    def placed(self, place: Callable[[str, Tensor], Tensor]) -> Operation:
        """The operation with each tensor where and as it is used; directions are of length one there."""
        changed = {name: place(name, tensor) for name, tensor in self.tensors().items()}
        for name in self.directions:
            changed[name] = changed[name] / changed[name].norm(dim=-1, keepdim=True)
        return replace(self, **changed)  # type: ignore[type-var]

    @property
    def elementwise(self) -> bool:
        """It treats each number by itself, so that it has a meaning for an attention matrix too."""
        return not self.directions

    def _check(self) -> None:
        kind = type(self).__name__
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.name in self._vectors and not isinstance(value, (Tensor, int, float)):
                value = torch.as_tensor(value)
                object.__setattr__(self, f.name, value)
            if isinstance(value, Tensor):
                self._check_tensor(f"{kind}: {f.name}", f.name, value)
            elif f.name in self.directions:
                raise EditError(f"{kind}: {f.name} {value!r}", has="a direction is a vector [width]")
            elif isinstance(value, (int, float)) and not isfinite(value):
                raise EditError(f"{kind}: {f.name} is {value}", instead="pass a finite number")

    def _check_tensor(self, what: str, name: str, value: Tensor) -> None:
        if not (value.is_floating_point() or value.dtype in (torch.int64, torch.int32)):
            raise EditError(f"{what} is a tensor of {value.dtype}", instead="pass a tensor of floats")
        if name in self.directions and value.numel() and bool((value == 0).all(-1).any()):
            raise EditError(f"{what} is zero, which is no direction")


@dataclass(frozen=True, slots=True, eq=False)
class Add(Operation):
    """Add ``scale * vector``."""

    _vectors = ("vector",)
    vector: Tensor | Number
    scale: float = 1.0

    def __post_init__(self) -> None:
        self._check()

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.vector * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class AddScaled(Operation):
    """Add ``strength * |x| * vector``, |x| the length of what is edited.

    Attributes:
        max_fraction: what is added is never longer than this times |x|.
    """

    _vectors = ("vector",)
    vector: Tensor
    strength: float = 1.0
    max_fraction: float = 1.0

    def __post_init__(self) -> None:
        self._check()
        if self.max_fraction < 0:
            raise EditError(f"AddScaled: max_fraction {self.max_fraction} is negative")

    @property
    def elementwise(self) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        step = self.vector * self.strength
        length = step.norm(dim=-1, keepdim=True)
        return x + step * (self.max_fraction / length.clamp_min(1e-30)).clamp_max(1.0) * x.norm(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True, eq=False)
class Scale(Operation):
    """Multiply the component along `direction` by `factor`: 0 removes it, 1 changes nothing."""

    _vectors = directions = ("direction",)
    direction: Tensor
    factor: float = 0.0

    def __post_init__(self) -> None:
        self._check()

    def __call__(self, x: Tensor) -> Tensor:
        along = (x * self.direction).sum(-1, keepdim=True)
        return x + (self.factor - 1) * along * self.direction


@dataclass(frozen=True, slots=True, eq=False)
class Cap(Operation):
    """Keep the projection on the unit vector along `direction` between `min` and `max`; one of them may be missing."""

    _vectors = directions = ("direction",)
    direction: Tensor
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        self._check()
        if self.min is None and self.max is None:
            raise EditError("Cap: neither min nor max", instead="pass at least one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise EditError(f"Cap: min {self.min} is above max {self.max}")

    def __call__(self, x: Tensor) -> Tensor:
        along = (x * self.direction).sum(-1, keepdim=True)
        return x + (along.clamp(self.min, self.max) - along) * self.direction


@dataclass(frozen=True, slots=True, eq=False)
class Swap(Operation):
    """Turn the component along `direction` into one of the same length along `target`."""

    _vectors = directions = ("direction", "target")
    direction: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        self._check()

    def __call__(self, x: Tensor) -> Tensor:
        along = (x * self.direction).sum(-1, keepdim=True)
        return x + along * (self.target - self.direction)


@dataclass(frozen=True, slots=True, eq=False)
class Set(Operation):
    """Put `value` there: a number, a vector, a mean over a dataset, or another run's activation."""

    _vectors = ("value",)
    value: Tensor | Number

    def __post_init__(self) -> None:
        self._check()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.value, dtype=x.dtype, device=x.device).expand_as(x)


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Operation):
    """Put there what `function` makes of the numbers, ``[batch, pos, width]``, in float32 or wider."""

    function: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise EditError(f"Apply: {self.function!r} cannot be called")

    def __call__(self, x: Tensor) -> Tensor:
        made: Any = self.function(x.clone())
        if not isinstance(made, Tensor) or made.shape != x.shape:
            got = f"a tensor {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise EditError(f"the function of an edit gave {got}", has=f"it was handed a tensor {tuple(x.shape)}")
        return made.to(x)


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A change to one named tensor of a forward pass; everything computed from it sees the new value.

    Edits are applied in forward order of what they change; several of one address in the order given.

    Attributes:
        address: what is changed, as :class:`Address`, string or ``(name, layer)``.
        operation: what becomes of it.
        where: which prompts, positions, heads and neurons; all of them by default.

    Raises:
        AddressError, EditError: not an address, or not an operation.
    """

    address: Address
    operation: Operation
    where: Where = Where()

    def __init__(self, address: AddressLike, operation: Operation, where: Where | None = None) -> None:
        if not isinstance(operation, Operation):
            raise EditError(f"{operation!r} is no operation", instead="pass for example Add(vector) or Set(0.0)")
        if where is not None and not isinstance(where, Where):
            raise EditError(f"{where!r} says no place", instead="pass for example Where(positions=[-1])")
        object.__setattr__(self, "address", to_address(address))
        object.__setattr__(self, "operation", operation)
        object.__setattr__(self, "where", where or Where())


@runtime_checkable
class Steering(Protocol):
    """What stands for edits: a :class:`locant.SteeringSpec`."""

    def edits(self) -> list[Edit]: ...


Edits = Edit | Steering | Sequence[Edit | Steering]


def as_edits(edits: Edits) -> list[Edit]:
    """One edit, several, or what stands for them.

    Raises:
        EditError: something else.
    """
    listed = [edits] if isinstance(edits, (Edit, Steering)) else list(edits)
    wrong = next((e for e in listed if not isinstance(e, (Edit, Steering))), None)
    if wrong is not None:
        raise EditError(f"{wrong!r} is no edit", instead="pass Edit(address, operation, where)")
    return [edit for one in listed for edit in ([one] if isinstance(one, Edit) else one.edits())]
