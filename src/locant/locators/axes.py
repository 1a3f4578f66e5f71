"""The axes a row can name, the activations it can read, and which axes each of those really has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property

from locant.address import Address, format_address, parse_address
from locant.errors import AddressError, LocantError, LocatorError
from locant.names import LOCATOR_NAMES, locator_name, point_of
from locant.points import POINTS, Point


class ModelAxis(StrEnum):
    """What a row names a value on; ``ACTIVATION`` is the key a coordinate gives its own activation under.

    Expert and stream exist only on the points that have them: a router's, and those of a trunk with several
    residual streams.
    """

    ACTIVATION = "activation"
    LAYER = "layer"
    HEAD = "head"
    NEURON = "neuron"
    POSITION = "position"
    DESTINATION_POSITION = "dest_pos"
    SOURCE_POSITION = "src_pos"
    EXPERT = "expert"
    STREAM = "stream"


class ModelLayerLocation(StrEnum):
    """The dotted names of activations. Every other point is located by its own name, as a string."""

    EMBEDDING = "embed"
    RESIDUAL_PRE = "resid.pre"
    RESIDUAL_MID = "resid.mid"
    RESIDUAL_POST = "resid.post"
    ATTENTION_IN = "attn.in"
    ATTENTION_Q = "attn.q"
    ATTENTION_K = "attn.k"
    ATTENTION_V = "attn.v"
    ATTENTION_PATTERN = "attn.pattern"
    ATTENTION_Z = "attn.z"
    ATTENTION_OUT_PRE_NORM = "attn.out_pre_norm"
    ATTENTION_OUT = "attn.out"
    MLP_IN = "mlp.in"
    MLP_PRE = "mlp.pre"
    MLP_PRE_LINEAR = "mlp.pre_linear"
    MLP_POST = "mlp.post"
    MLP_OUT_PRE_NORM = "mlp.out_pre_norm"
    MLP_OUT = "mlp.out"


_AXES: dict[str, ModelAxis] = {axis.value: axis for axis in ModelAxis}

POSITIONS = frozenset({ModelAxis.POSITION, ModelAxis.DESTINATION_POSITION, ModelAxis.SOURCE_POSITION})
"""The axes whose size is the prompt's."""

_ACTIVATIONS = f"{', '.join(LOCATOR_NAMES)}, a point of locant.POINTS, or an address such as resid_post.5"


@dataclass(frozen=True, eq=False)
class Place:
    """What an activation says: a point, and where it is written as an address also a layer and a stream."""

    point: Point
    layer: int | None = None
    stream: int | None = None

    @cached_property
    def name(self) -> str:
        """How an index spells the activation."""
        return locator_name(self.point.name)

    @cached_property
    def given(self) -> dict[ModelAxis, int]:
        """The axes an address has named already."""
        said = {ModelAxis.LAYER: self.layer, ModelAxis.STREAM: self.stream}
        return {axis: value for axis, value in said.items() if value is not None}

    @cached_property
    def axes(self) -> tuple[ModelAxis, ...]:
        """Every axis a row may name here. A point with two stream axes has none that ``stream`` could mean."""
        once = [ModelAxis(axis) for axis in self.point.axes if self.point.axes.count(axis) == 1]
        layer = [ModelAxis.LAYER] if self.point.scope == "block" else []
        stream = [ModelAxis.STREAM] if self.point.takes_stream and ModelAxis.STREAM not in once else []
        return (*layer, *stream, *once)

    @cached_property
    def selecting(self) -> frozenset[ModelAxis]:
        """The axes that pick the tensor rather than a part of it, so that a row holds one value on each."""
        return frozenset({ModelAxis.LAYER, *({ModelAxis.STREAM} - {ModelAxis(a) for a in self.point.axes})})

    def factors(self, axis: ModelAxis) -> tuple[str, ...]:
        """The facts whose product is the size of one of the tensor's own axes."""
        heads = {"n_heads", "n_kv_heads"}.intersection(self.point.width)
        if axis is ModelAxis.HEAD:
            return tuple(heads)
        if axis is ModelAxis.STREAM:
            return ("n_streams",)
        if axis is ModelAxis.NEURON and ModelAxis.STREAM in self.point.axes:
            return ("d_model",)
        return tuple(factor for factor in self.point.width if factor not in heads)


@cache
def place_of(activation: str) -> Place:
    """The place an activation names, in the form that :func:`activation_of` gives it."""
    if activation in POINTS or activation in LOCATOR_NAMES:
        return Place(POINTS[point_of(activation)])
    address = parse_address(activation)
    assert address.point is not None, "activation_of lets no module path through"
    return Place(address.point, address.layer, address.stream)


def activation_of(value: object) -> ModelLayerLocation | str:
    """An activation in any of its spellings, in the one that a locator keeps.

    Returns:
        A member for the dotted names and their points, else the point's name, else the address as a string.

    Raises:
        LocatorError: it is none of them.
    """
    text = format_address(value) if isinstance(value, Address) else value
    if not isinstance(text, str):
        raise LocatorError(f"activation {value!r}: of type {type(value).__name__}", f"allowed: {_ACTIVATIONS}")
    if text not in POINTS and text not in LOCATOR_NAMES:
        return _address(text)
    name = locator_name(point_of(text))
    return ModelLayerLocation(name) if name in LOCATOR_NAMES else name


def axis_of(value: object, where: str) -> ModelAxis:
    """A member of :class:`ModelAxis` from itself or its value.

    Raises:
        LocatorError: it is no axis.
    """
    if isinstance(value, str) and value in _AXES:
        return _AXES[value]
    axes = ", ".join(axis for axis in ModelAxis if axis is not ModelAxis.ACTIVATION)
    raise LocatorError(f"{where}: {value!r} is no axis", f"the axes are {axes}")


def _address(text: str) -> str:
    try:
        address = parse_address(text)
        if address.point is None:
            point_of(text)
    except AddressError as error:
        raise LocatorError(f"activation {error.asked}", error.has, error.instead) from None
    except LocantError as error:
        raise LocatorError(f"activation {text!r}", f"allowed: {_ACTIVATIONS}", error.instead) from None
    return format_address(address)
