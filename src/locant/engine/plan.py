"""Plan: what a capture will do, decided and checked before any forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from locant.address import Address, AddressLike, format_address, to_address
from locant.anatomy.anatomy import Anatomy
from locant.anatomy.proof import Verdict
from locant.anatomy.sites import OpSite, Site
from locant.engine.cache import Layout, spans_of
from locant.errors import (
    AddressError,
    LayerOutOfRange,
    ModulePathError,
    PointError,
    PointUnavailable,
    did_you_mean,
)
from locant.points import INSTEAD, POINTS, REQUIREMENTS

Addresses = AddressLike | Iterable[AddressLike]


@dataclass(frozen=True, slots=True)
class Plan:
    """The sites one capture reads, and those it changes.

    Attributes:
        reads: the site of each address, in the order asked.
        layouts: what the axes of each result, and of each tensor that is changed, are.
        writes: where each edited address is changed.
    """

    reads: Mapping[Address, Site]
    layouts: Mapping[Address, Layout]
    writes: Mapping[Address, Site] = field(default_factory=dict)

    def __str__(self) -> str:
        names: dict[str, list[int]] = {}
        for address in self.reads:
            names.setdefault(address.name, []).extend([] if address.layer is None else [address.layer])
        points = "; ".join(f"{n} at layers {spans_of(at)}" if at else n for n, at in names.items())
        inside = sum(isinstance(s, OpSite) for s in self.reads.values())
        changed = ", ".join(map(format_address, self.writes))
        reads = f"reads {len(self.reads)} tensors ({points}), {inside} of them inside a module"
        return reads + (f"; changes {changed}" if changed else "")


@dataclass(frozen=True, slots=True)
class PointStatus:
    """What one model does with one point of one layer.

    Attributes:
        served: it can be captured, and what is captured is what the point's name says.
        width: numbers in its last axis; ``None`` where the prompt's length decides.
        how: the site it is read at, or ``""``.
        proof: ``proven``, ``refused``, ``vacuous`` or ``not applicable``.
        error: the largest relative error of the identities that prove it.
        reason: why it is not served, one sentence.
        instead: what to read instead, where there is something.
    """

    address: Address
    served: bool
    width: int | None
    how: str
    proof: str
    error: float | None = None
    reason: str = ""
    instead: str = ""


class Catalogue:
    """Everything one model serves and refuses: the sites of its anatomy and the verdicts of their proofs."""

    def __init__(self, anatomy: Anatomy, verdicts: Mapping[Address, Verdict]) -> None:
        self.anatomy = anatomy
        self.verdicts = verdicts

    def plan(self, addresses: Addresses, writes: Mapping[Address, Site] | None = None) -> Plan:
        """The plan of a capture; `writes` are the sites it changes.

        Raises:
            AddressError: something in `addresses` is no address, or there are none.
            PointError: the model has no such point, layer or module, or refuses to serve it.
        """
        wanted = dict.fromkeys(as_addresses(addresses))
        if not wanted:
            raise AddressError("no addresses: the list is empty", instead="name at least one, e.g. 'resid_post.0'")
        reads = {address: copy(self.site(address)) for address in wanted}
        writes = writes or {}
        return Plan(reads, {a: self.layout(a, site) for a, site in {**writes, **reads}.items()}, writes)

    def refuses(self, address: AddressLike) -> str | None:
        """Why this model does not serve an address; ``None`` when it does. Never raises."""
        try:
            self.site(to_address(address))
        except (AddressError, PointError) as error:
            return str(error)
        return None

    def site(self, address: Address) -> Site:
        """Where to read one address."""
        if address.module_path is not None:
            return self._module(address)
        facts, name = self.anatomy.facts, format_address(address)
        if address.layer is not None and address.layer >= facts.n_layers:
            raise LayerOutOfRange(
                f"{name}: layer {address.layer}",
                has=f"this model has {facts.n_layers} layers, 0 to {facts.n_layers - 1}",
                instead=f"the last one is {address.name}.{facts.n_layers - 1}",
            )
        self._check_stream(address)
        site = self.anatomy.site(address)
        if site is None:
            reason, instead = self._absence(address)
            raise PointUnavailable(f"{name}: {reason}", has=self._layers_having(address), instead=instead)
        verdict = self.verdict(address)
        if verdict is not None and verdict.state != "proven":
            raise PointUnavailable(f"{name}: {verdict.reason}", has=f"it was found at {site}")
        return site

    def check_writable(self, address: Address) -> None:
        """Refuse what no edit may change, whatever the model.

        Raises:
            PointUnavailable: a coefficient, a choice of experts, or a module's output that has no positions.
        """
        point = address.point
        if point is not None and point.read_only is not None:
            raise PointUnavailable(
                f"{format_address(address)} cannot be edited: {point.read_only}",
                instead="edit what it is made of, or what it acts on",
            )
        if self.site(address).view.layout == "raw":
            raise PointUnavailable(f"{format_address(address)} cannot be edited: it has no positions")

    def width(self, address: Address) -> int | None:
        """Numbers in the last axis of an address; ``None`` where the prompt or the module decides it."""
        point, facts = address.point, self.anatomy.facts.at(address.layer)
        if point is None:
            return None
        return facts.d_model if "stream" in point.axes else point.width_of(facts)

    def verdict(self, address: Address) -> Verdict | None:
        """What the proof says of an address; each stream of a stack is proven with the others."""
        return self.verdicts.get(replace(address, stream=None))

    def status(self) -> list[PointStatus]:
        """One row per point and layer, in forward order."""
        layers = range(self.anatomy.facts.n_layers)
        everywhere = [(p, layer) for p in POINTS.values() for layer in ([None] if p.scope == "trunk" else layers)]
        addresses = [Address(point.name, layer) for point, layer in everywhere]
        return [self._status(replace(a, stream=stream)) for a in addresses for stream in self._streams_of(a)]

    def _status(self, address: Address) -> PointStatus:
        point = POINTS[address.name]
        width = point.width_of(self.anatomy.facts.at(address.layer))
        site, verdict = self.anatomy.site(address), self.verdict(address)
        if site is None:
            reason, instead = self._absence(address)
            return PointStatus(address, False, width, "", "not applicable", None, reason, instead)
        if verdict is None:
            return PointStatus(address, True, width, str(site), "not run")
        served = verdict.state == "proven"
        return PointStatus(address, served, width, str(site), verdict.state, verdict.error, verdict.reason)

    def _streams_of(self, address: Address) -> Sequence[int | None]:
        """The streams that have an address of their own: each of several, of a point that is one vector."""
        site = self.anatomy.site(replace(address, stream=None))
        n = 1 if site is None else site.view.streams
        return range(n) if n > 1 and "stream" not in POINTS[address.name].axes else [None]

    def _check_stream(self, address: Address) -> None:
        n, name = self.anatomy.facts.n_streams, format_address(address)
        if address.stream is None and self._streams_of(address) != [None]:
            raise PointUnavailable(
                f"{name}: the residual of this model is {n} streams",
                has=f"one of them is {name}.stream-0 to {name}.stream-{n - 1}",
                instead=f"name the stream, or read all of them after the block: resid_streams.{address.layer}",
            )
        site = self.anatomy.site(replace(address, stream=None))
        if address.stream is not None and (n == 1 or (site is not None and site.view.streams == 1)):
            raise PointUnavailable(
                f"{name}: a stream coordinate",
                has="this model has one residual stream" if n == 1 else f"{address.name} of this block is one vector",
                instead="leave the stream out",
            )
        if address.stream is not None and address.stream >= n:
            raise PointUnavailable(
                f"{name}: stream {address.stream}", has=f"this model has {n} residual streams, 0 to {n - 1}"
            )

    def _absence(self, address: Address) -> tuple[str, str]:
        needs = POINTS[address.name].needs
        reason = self.anatomy.part(address.layer).absent.get(address.name)
        return reason or f"it takes {REQUIREMENTS[needs]}", INSTEAD.get(needs, "")

    def _layers_having(self, address: Address) -> str | None:
        having = [i for i, block in enumerate(self.anatomy.blocks) if address.name in block.sites]
        return f"layers {spans_of(having)} of this model have it" if having else None

    def _module(self, address: Address) -> Site:
        path = address.module_path or ""
        outputs = self.anatomy.outputs
        if path in outputs:
            site, calls = outputs[path]
            if calls > 1:
                raise PointUnavailable(
                    f"{address}: this module runs {calls} times in one forward, so its path names several tensors",
                    instead="name the point instead",
                )
            return site
        first = path.split(".")[0]
        close = did_you_mean(path, outputs) or did_you_mean(first, POINTS)
        raise ModulePathError(
            f"{address}: no point, and no module with an output on this model",
            has=f"{len(outputs)} modules, e.g. {', '.join(list(outputs)[1:4])}",
            instead=close or "print(model.hf) shows its modules",
        )

    def layout(self, address: Address, site: Site) -> Layout:
        point = POINTS.get(address.name)
        if point is None:
            return Layout(position_axis=None if site.view.layout == "raw" else 1)
        facts = self.anatomy.facts.at(address.layer)
        if site.view.layout == "matrix":
            return Layout(position_axis=2, heads=facts.n_heads, matrix=True)
        heads = next((getattr(facts, f) for f in ("n_heads", "n_kv_heads") if f in point.width), None)
        return Layout(position_axis=1, heads=heads)


def as_addresses(addresses: Addresses) -> Sequence[Address]:
    """One address or several, each in any of its forms, as addresses."""
    if isinstance(addresses, Iterable) and not isinstance(addresses, (str, Address)) and not _is_one(addresses):
        return [to_address(a) for a in addresses]  # pyright: ignore[reportArgumentType]
    return [to_address(addresses)]  # pyright: ignore[reportArgumentType]


def _is_one(value: object) -> bool:
    """A ``(name, layer)`` or ``(name, layer, stream)`` tuple rather than a tuple of addresses."""
    return isinstance(value, tuple) and len(value) in (2, 3) and not isinstance(value[1], (str, Address, tuple))
