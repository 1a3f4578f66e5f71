"""What each sublayer adds to the residual, and what makes the residual of one place from that of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from locant.anatomy.anatomy import Move
from locant.anatomy.attention import Found
from locant.anatomy.channel import ChannelFound, mixture
from locant.anatomy.formula import Formula, Named, formula_of
from locant.anatomy.residual import Flow, Step, scaled
from locant.anatomy.sites import Site, View
from locant.anatomy.structure import Scope, hidden_input, is_heavy, output_site, rows
from locant.anatomy.trace import Event, Value, same


@dataclass(slots=True)
class Contributions:
    """The additions of one block, under the names of the points they are.

    Attributes:
        beside: where to read what is added and is neither attention's nor the MLP's.
    """

    sites: dict[str, Site] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    beside: dict[str, Site] = field(default_factory=dict)
    formulas: dict[str, Formula | Named] = field(default_factory=dict)
    to_attn: tuple[Move, ...] = ()
    to_mid: tuple[Move, ...] | None = None
    to_post: tuple[Move, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Share:
    """One sublayer's part in one addition."""

    point: str
    step: Step
    raw: Event
    value: Value
    rest: Sequence[Value]


def find_contributions(scope: Scope, flow: Flow, attention: Found, channel: ChannelFound) -> Contributions:
    """What attention and MLP add to the residual of one block, and the residual's way around them."""
    found, shares = Contributions(), list[_Share]()
    for short, sublayer in (("attn", attention), ("mlp", channel)):
        raw, point = sublayer.raw, f"{short}_out_post"
        if raw is None:
            continue
        step = flow.addition_of(raw)
        if step is None:
            found.sites[point] = _unfollowed(scope, raw, short, found)
            continue
        others = [e for e in scope.children if is_heavy(e) and e not in sublayer.parts]
        share = _Share(point, step, raw, *flow.share(step, raw, others))
        shares.append(share)
        _place(scope, flow, share, short, sublayer, found)
    _follow(flow, shares, channel.middle, found)
    if attention.source is not None:
        before = _moves(flow, flow.to(attention.source), shares, found)
        found.to_attn = before or ()
    return found


def _place(scope: Scope, flow: Flow, share: _Share, short: str, sublayer: Found, found: Contributions) -> None:
    """The site of a contribution: the raw output or its norm, times a constant; else wherever it is made."""
    bare, factor = scaled(share.value)
    if scope.gives(share.value) and not same(bare, share.raw.output()):
        bare, factor = share.value, 1.0
    norm = scope.norm_giving(bare) or _module_between(scope, share.raw, bare)
    normed = hidden_input(norm) if norm is not None else None
    raw: Value | None = share.raw.output()
    site: Site | None = sublayer.sites.get(f"{short}_out")
    if (
        site is None
        and norm is None
        and len(sublayer.parts) == 1
        and _computed(scope, share.value, raw, short) is not None
    ):
        site = found.sites[f"{short}_out"] = output_site(share.raw)
        found.constants |= mixture(raw, sublayer)
    elif site is None:  # the MLP is several modules whose outputs are added, or norms what they add
        raw = normed[1] if normed is not None else bare
        site = flow.site(raw)
        if site is not None:
            found.sites[f"{short}_out"] = site
        found.constants |= mixture(raw, sublayer)
    if norm is not None and normed is not None and same(normed[1], raw):
        found.modules[f"{short}_post_norm"] = norm.name
        found.sites[share.point] = output_site(norm, _scaled_view(norm, factor))
    elif same(bare, raw) and site is not None:
        found.sites[share.point] = replace(site, view=replace(site.view, scale=factor))
    elif (elsewhere := flow.site(share.value)) is not None:
        found.sites[share.point] = elsewhere
        if (made := _computed(scope, share.value, raw, short)) is not None:
            found.formulas[share.point] = made


def _module_between(scope: Scope, raw: Event, added: Value) -> Event | None:
    """The module that makes what is added of a sublayer's output, e.g. a short convolution."""
    for event in scope.calls:
        read, given = hidden_input(event), event.output()
        if read is None or same(given, read[1]):  # a dropout that hands on what it takes
            continue
        if event is not raw and same(given, added) and same(read[1], raw.output()):
            return event
    return None


def _computed(scope: Scope, added: Value, raw: Value | None, short: str) -> Formula | Named | None:
    """How what is added follows from the sublayer's own output, element by element."""
    return formula_of(added, scope.trace, scope.run.index, lambda v: f"{short}_out" if same(v, raw) else None)


def _scaled_view(event: Event, factor: float) -> View | None:
    given = event.output()
    return replace(rows(given), scale=factor) if given is not None else None


def _unfollowed(scope: Scope, raw: Event, short: str, found: Contributions) -> Site:
    """The contribution where the residual cannot be followed: the raw output, normed if a norm reads it."""
    norm = scope.norm_reading(raw.output())
    if norm is None or norm.index < raw.index:
        return output_site(raw)
    found.modules[f"{short}_post_norm"] = norm.name
    return output_site(norm)


def _follow(flow: Flow, shares: Sequence[_Share], middle: Value | None, found: Contributions) -> None:
    entering, leaving = flow.scope.residual[1], flow.scope.leaving
    if leaving is None:
        return
    if middle is not None:
        found.to_mid = _moves(flow, flow.between(entering, middle), shares, found)
    found.to_post = _moves(flow, flow.between(middle or entering, leaving), shares, found)


def _moves(
    flow: Flow, steps: Sequence[Step] | None, shares: Sequence[_Share], found: Contributions
) -> tuple[Move, ...] | None:
    if steps is None:
        return None
    moves: list[Move] = []
    for step in steps:
        if step.kind == "norm":
            moves.append(Move("norm", step.event.name))
        elif step.kind == "scale":
            moves.append(Move("scale", factor=step.factor))
        elif step.kind == "mix":
            moves.append(Move("mix"))
        elif step.kind in ("weight", "bias"):
            moves.append(Move(step.kind, step.weight))
        else:
            parts = _added(flow, step, shares, found.beside)
            if parts is None:
                return None
            moves.extend(parts)
    return tuple(moves)


def _added(flow: Flow, step: Step, shares: Sequence[_Share], beside: dict[str, Site]) -> list[Move] | None:
    here = [share for share in shares if share.step is step]
    moves = [Move("add", share.point) for share in here]
    rest = [v for share in here for v in share.rest if not any(flow.fed_by(v, other.raw) for other in here)]
    if not here and step.side is not None:
        rest = [step.side]
    for value in rest:
        site = flow.site(value)
        if site is None:
            return None
        name = f"added.{len(beside)}"
        beside[name] = site
        moves.append(Move("add", name))
    return moves
