"""Address: one named tensor of a forward pass, and its one string form.

::

    point                resid_post.5   embeddings   resid_post.5.stream-2
    module path          model.layers.5.mlp.down_proj
    ... whose first part is a point's name, or "path"
                         path.lm_head.weight_norm      (the module lm_head.weight_norm)

A string whose first part is the name of a point is that point with its coordinates, and every other string
is a module path, verbatim. A module path that would be read as something else is written with ``path.`` in
front, and only such a path is, so that no tensor has two spellings. ``path`` alone is therefore no address;
a module of that name is ``path.path``. Only ``A-Z a-z 0-9 . _ ~ -`` occur, so an address needs no quoting in
a shell, a query string or a file name.
"""

import re
from dataclasses import dataclass
from functools import lru_cache, total_ordering

from locant.errors import AddressError, UnknownCoordinate, did_you_mean
from locant.points import POINTS, Point

_ESCAPE = "path"
_STREAM = "stream-"
_MAX_DIGITS = 9
_FORMS = 'An address is a point ("embeddings", "resid_post.5", "resid_post.5.stream-2") or a module path'
_FOREIGN = re.compile(r"[^A-Za-z0-9._~-]")
_NUMBER = re.compile(r"[0-9]+")


@total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """One named tensor: a point with its coordinates, or a module of the loaded model.

    Args:
        name: the name of a point, or a module path as the string form writes it
            (:meth:`of_module` writes it for you).
        layer: which block execution of one forward, counted from 0 in flattened order. Points inside a
            block need it; trunk-level points and module paths have none.
        stream: which residual stream, on a trunk with several; only for points that have them.

    Addresses are hashable and ordered by name, layer and stream. One that exists is valid.

    Raises:
        AddressError: the fields do not name one tensor.
        UnknownCoordinate: the point has no such coordinate.
    """

    name: str
    layer: int | None = None
    stream: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        for field, number in (("layer", self.layer), ("stream", self.stream)):
            if number is not None:
                _check_number(self.name, field, number)
        point = POINTS.get(self.name)
        if point is None:
            _check_module_path(self)
        else:
            _check_coordinates(self, point)

    @classmethod
    def of_module(cls, path: str) -> "Address":
        """The address of a module, from its path on the loaded model (``model.named_modules()``).

        Raises:
            AddressError: no module can have this path.
        """
        _check_name(path)
        return cls(_escaped(path))

    @property
    def point(self) -> Point | None:
        """The point, or None where the address is a module path."""
        return POINTS.get(self.name)

    @property
    def module_path(self) -> str | None:
        """The module's path on the model, or None where the address is a point."""
        return None if self.name in POINTS else self.name.removeprefix(f"{_ESCAPE}.")

    def __str__(self) -> str:
        return format_address(self)

    def __repr__(self) -> str:
        fields = [repr(self.name), *(repr(n) for n in (self.layer, self.stream) if n is not None)]
        return f"Address({', '.join(fields)})"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Address):
            return NotImplemented
        return _sort_key(self) < _sort_key(other)


AddressLike = Address | str | tuple[str, int | None] | tuple[str, int | None, int | None]
"""What ``to_address`` reads."""


def format_address(address: Address) -> str:
    """The string form; ``parse_address`` reads it back to an equal address."""
    parts = [address.name]
    if address.layer is not None:
        parts.append(str(address.layer))
    if address.stream is not None:
        parts.append(f"{_STREAM}{address.stream}")
    return ".".join(parts)


def parse_address(text: str) -> Address:
    """Read the string form. Nothing in it is ever skipped.

    Raises:
        AddressError: the text is no address.
        UnknownCoordinate: it names a point with a coordinate that is unknown, repeated or out of order.
    """
    if not isinstance(text, str):
        _check_name(text)
    return _parsed(text)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Address:
    _check_name(text)
    name, *coordinates = text.split(".")
    if name not in POINTS:
        return Address(text)
    layer = stream = None
    if coordinates and _NUMBER.fullmatch(coordinates[0].removeprefix("-")):
        layer = _number(text, "layer", coordinates.pop(0))
    if layer is not None and coordinates and coordinates[0].startswith(_STREAM):
        stream = _number(text, "stream", coordinates.pop(0).removeprefix(_STREAM))
    if coordinates:
        raise _unknown_coordinate(text, POINTS[name], coordinates[0])
    return Address(name, layer, stream)


def to_address(value: AddressLike) -> Address:
    """An address from any of its forms: itself, its string, or a tuple ``(name, layer[, stream])``.

    Raises:
        AddressError: the value is none of them, or does not name one tensor.
    """
    if isinstance(value, Address):
        return value
    if isinstance(value, str):
        return parse_address(value)
    if isinstance(value, tuple):
        if len(value) == 2:
            return Address(value[0], value[1])
        if len(value) == 3:
            return Address(value[0], value[1], value[2])
    raise AddressError(
        asked=f"{value!r}: no address",
        has="An address is an Address, its string form, or a tuple (name, layer) or (name, layer, stream)",
        instead="Write for example Address('resid_post', 5) or 'resid_post.5'",
    )


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise AddressError(asked=f"{name!r}: the name of an address is a string, not {type(name).__name__}", has=_FORMS)
    if foreign := _FOREIGN.search(name):
        raise AddressError(
            asked=f"{name!r}: an address has no {foreign.group()!r}",
            has=_FORMS,
            instead=_respelled(name),
        )
    if not all(name.split(".")):
        raise AddressError(
            asked=f"{name!r}: an address has no empty parts" if name else "'': an address is not empty",
            has=_FORMS,
        )
    if name.startswith(("-", "~")):
        raise AddressError(asked=f"{name!r}: an address starts with a letter, a digit or '_'", has=_FORMS)


def _check_number(name: str, field: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise AddressError(
            asked=f"{name}: {field} {number!r} is of type {type(number).__name__}",
            has=f"The {field} of an address is an int",
            instead="Write int(...) around a number of another library",
        )
    if number < 0:
        raise AddressError(
            asked=f"{name}: its {field} is negative",
            has=f"An address names one tensor, so its {field} counts from 0",
            instead="A locator can count from the end",
        )
    if number >= 10**_MAX_DIGITS:
        raise AddressError(asked=f"{name}: its {field} has more than {_MAX_DIGITS} digits")


def _check_coordinates(address: Address, point: Point) -> None:
    if point.scope == "trunk" and (address.layer is not None or address.stream is not None):
        raise AddressError(
            asked=f"{format_address(address)}: {point.name} is not in a block and takes no coordinates",
            instead=f"Write {point.name!r}",
        )
    if point.scope == "block" and address.layer is None:
        raise AddressError(
            asked=f"{format_address(address)}: the layer is missing",
            has=f"There is one {point.name} in every block",
            instead=f"Write for example '{point.name}.5'",
        )
    if address.stream is not None and not point.takes_stream:
        streamed = ", ".join(name for name, other in POINTS.items() if other.takes_stream)
        raise UnknownCoordinate(
            asked=f"{format_address(address)}: {point.name} has no stream",
            has=f"Points with a stream: {streamed}",
            instead=f"Write '{point.name}.{address.layer}'",
        )


def _check_module_path(address: Address) -> None:
    name = address.name
    if address.layer is not None or address.stream is not None:
        raise AddressError(
            asked=f"{format_address(address)}: {name} is no point, and a module path takes no coordinates",
            instead=did_you_mean(name, POINTS) or "Write the whole path as the name",
        )
    head, _, rest = name.partition(".")
    if head in POINTS:
        raise AddressError(
            asked=f"{name}: the name of an address carries no coordinates",
            has=f"{head} is a point",
            instead=f"Write parse_address({name!r}), or 'path.{name}' for the module of that path",
        )
    if head == _ESCAPE and not rest:
        raise AddressError(
            asked=f"{name}: a path has to follow",
            has="'path.' stands before a module path that starts with the name of a point",
            instead="The module called path is 'path.path'",
        )
    if head == _ESCAPE and _escaped(rest) == rest:
        raise AddressError(
            asked=f"{name}: this path needs no 'path.' before it",
            has="Only a module path that starts with the name of a point, or with path, does",
            instead=f"Write {rest!r}",
        )


def _unknown_coordinate(text: str, point: Point, coordinate: str) -> UnknownCoordinate:
    known = ["a layer"] if point.scope == "block" else []
    known += ["then stream-S"] if point.takes_stream else []
    return UnknownCoordinate(
        asked=f"{text}: {coordinate} is no coordinate of {point.name}, or not in this place",
        has=f"After {point.name} comes {', '.join(known)}" if known else f"{point.name} has no coordinates",
        instead=f"If this is a module path, write 'path.{text}'",
    )


def _number(text: str, field: str, digits: str) -> int:
    canonical = _NUMBER.fullmatch(digits) and (digits == "0" or not digits.startswith("0"))
    if not canonical or len(digits) > _MAX_DIGITS:
        raise AddressError(
            asked=f"{text}: {digits!r} is no {field}",
            has=f"A {field} is written in at most {_MAX_DIGITS} digits, without a sign or leading zeros",
        )
    return int(digits)


def _respelled(text: str) -> str | None:
    """The advice for the one old spelling that is still around, ``resid_post:5``."""
    name, colon, layer = text.partition(":")
    return f"Write '{name}.{layer}'" if colon and name in POINTS and _NUMBER.fullmatch(layer) else None


def _escaped(path: str) -> str:
    head = path.partition(".")[0]
    return f"{_ESCAPE}.{path}" if head in POINTS or head == _ESCAPE else path


def _sort_key(address: Address) -> tuple[str, int, int]:
    layer, stream = (-1 if number is None else number for number in (address.layer, address.stream))
    return address.name, layer, stream
