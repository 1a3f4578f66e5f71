"""Steering specs: edits by layer, in the spelling other steering code is written in. Each becomes plain edits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from locant.address import Address, AddressLike, to_address
from locant.engine.edits import Add, AddScaled, Cap, Edit, Operation, Scale, Swap, Where
from locant.errors import EditError


@dataclass(frozen=True, slots=True, eq=False)
class AddSpec:
    """Add ``scale * vector``; of the vector's direction alone if `normalize`."""

    vector: Tensor
    scale: float = 1.0
    normalize: bool = False

    def operation(self) -> Operation:
        return Add(_unit(self.vector) if self.normalize else self.vector, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class NormScaledAddSpec:
    """Add ``strength * |x| * vector``, at most ``max_fraction * |x|`` long; of its direction alone if `normalize`."""

    vector: Tensor
    strength: float
    max_fraction: float = 1.0
    normalize: bool = False

    def operation(self) -> Operation:
        return AddScaled(_unit(self.vector) if self.normalize else self.vector, self.strength, self.max_fraction)


@dataclass(frozen=True, slots=True, eq=False)
class OrthogonalDecompSpec:
    """Multiply the component along `vector` by `coeff`, and keep what is orthogonal to it."""

    vector: Tensor
    coeff: float = 1.0

    def operation(self) -> Operation:
        return Scale(self.vector, self.coeff)


@dataclass(frozen=True, slots=True, eq=False)
class AblateSpec:
    """Remove the component along `vector`."""

    vector: Tensor

    def operation(self) -> Operation:
        return Scale(self.vector, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionCapSpec:
    """Keep the projection on the unit vector along `vector` between `min` and `max`."""

    vector: Tensor
    min: float | None = None
    max: float | None = None

    def operation(self) -> Operation:
        return Cap(self.vector, self.min, self.max)


@dataclass(frozen=True, slots=True, eq=False)
class SwapSpec:
    """Turn the component along `vector` into one along `target`."""

    vector: Tensor
    target: Tensor

    def operation(self) -> Operation:
        return Swap(self.vector, self.target)


Spec = AddSpec | NormScaledAddSpec | OrthogonalDecompSpec | AblateSpec | ProjectionCapSpec | SwapSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerSteeringSpec:
    """What is done at one layer, in order."""

    operations: Sequence[Spec | Operation]


@dataclass(frozen=True, slots=True, eq=False)
class SteeringSpec:
    """What is done to one point at some layers.

    Attributes:
        layers: for each layer one spec or operation, a list of them, or a :class:`LayerSteeringSpec`.
        point: a point that each block has; :meth:`at` takes those outside the blocks too.
        stream: of several residual streams, the one.
        where: the prompts, positions, heads and neurons.
    """

    layers: Mapping[int | None, LayerSteeringSpec | Spec | Operation | Sequence[Spec | Operation]]
    point: str = "resid_post"
    stream: int | None = None
    where: Where = field(default_factory=Where)

    @classmethod
    def at(cls, address: AddressLike, *operations: Spec | Operation, where: Where | None = None) -> SteeringSpec:
        """The spec of one address, e.g. ``SteeringSpec.at("resid_post.5", AddSpec(v))``."""
        place = to_address(address)
        return cls({place.layer: operations}, place.name, place.stream, where or Where())

    def edits(self) -> list[Edit]:
        """The edits this spec stands for.

        Raises:
            AddressError, EditError: it names no tensor, does nothing, or holds what is no operation.
        """
        found = [
            Edit(Address(self.point, layer, self.stream), made, self.where)
            for layer, given in self.layers.items()
            for made in _operations(given)
        ]
        if not found:
            raise EditError("a SteeringSpec without operations", instead="name at least one layer and operation")
        return found


def _operations(given: object) -> list[Operation]:
    listed = given.operations if isinstance(given, LayerSteeringSpec) else given
    each = list(listed) if isinstance(listed, (list, tuple)) else [listed]
    made = [spec.operation() if isinstance(spec, Spec) else spec for spec in each]
    wrong = next((m for m in made if not isinstance(m, Operation)), None)
    if wrong is not None:
        raise EditError(f"{wrong!r} is no operation", instead="pass for example AddSpec(vector)")
    return made  # type: ignore[return-value]


def _unit(vector: Tensor) -> Tensor:
    length = vector.norm(dim=-1, keepdim=True)
    if bool((length == 0).any()):
        raise EditError("a vector of zeros has no direction", instead="pass normalize=False")
    return vector / length
