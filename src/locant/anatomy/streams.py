"""Find how a block reads, mixes and writes several residual streams (hyper-connections)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from locant.anatomy.anatomy import Move
from locant.anatomy.attention import Found
from locant.anatomy.channel import ChannelFound
from locant.anatomy.contributions import Contributions
from locant.anatomy.residual import Flow, Step, scaled, unchanged_from, write_of
from locant.anatomy.sites import ModuleSite, Site, View
from locant.anatomy.structure import PRODUCTS, Scope, hidden_input, is_heavy, is_linear, op_site
from locant.anatomy.trace import Event, Trace, Value, same
from locant.errors import ModelError

_MOVED = ("mix", "write")


def stack_view(trace: Trace, runs: Sequence[Event], ids_shape: Sequence[int], d_model: int | None) -> View | None:
    """How the blocks' residual holds several streams; ``None`` where it is one vector per token.

    Args:
        trace: of one forward.
        runs: its block executions.
        ids_shape: ``(1, pos)`` of the traced tokens.
        d_model: width of the token embeddings, where there is one. A residual that is a multiple of it wide, in blocks
            whose sublayers are not, is several streams side by side.

    Raises:
        ModelError: the residual has an axis that is neither the batch, the tokens nor the width.
    """
    found = hidden_input(runs[0])
    assert found is not None, "a block run is chosen by having one"
    shape, given = found[1].shape, tuple(ids_shape)
    if len(shape) == 4 and shape[:2] == given and shape[2] > 1:
        return View(streams=shape[2])
    if len(shape) == 4 and shape[1:3] == given and shape[0] > 1:
        return View("streams_first", streams=shape[0])
    if len(shape) > 3:
        raise ModelError(
            f"the residual of {runs[0].name} has the shape {tuple(shape)} for ids of the shape {given}",
            has="no axis of it could be told to be that of several residual streams",
            instead="load a decoder-only language model with one residual stream, or with several stacked in one axis",
        )
    if d_model is None or shape[-1] == d_model or shape[-1] % d_model:
        return None
    inside = Scope(trace, runs[0]).children
    narrow = [e for e in inside if is_heavy(e) and _width(e.output()) == _width(_taken(e)) == d_model]
    return View("streams_flat", streams=shape[-1] // d_model) if narrow else None


@dataclass(slots=True)
class Streams:
    """The stream points of one block, and what its identities need."""

    sites: dict[str, Site] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    beside: dict[str, Site] = field(default_factory=dict)


def find_streams(scope: Scope, flow: Flow, attention: Found, channel: ChannelFound) -> Streams:
    """What attention and MLP read from the streams and write to them; moves `resid_mid` to the stack between them."""
    found = Streams()
    channel.sites.pop("resid_mid", None)
    channel.middle = None
    for short, sublayer in (("attn", attention), ("mlp", channel)):
        if sublayer.raw is None:
            continue
        _read(scope, short, sublayer, found)
        step = flow.addition_of(sublayer.raw)
        _written(scope, short, step, found)
        if short == "attn" and step is not None and channel.raw is not None:
            channel.middle = step.value
            channel.sites["resid_mid"] = _middle(scope, flow, step.value)
    return found


def _middle(scope: Scope, flow: Flow, value: Value) -> Site:
    """The stack between attention and MLP, as the model hands it on."""
    for event in scope.calls:
        taken = hidden_input(event)
        if (
            taken is not None
            and taken[1].shape == value.shape
            and any(same(v, value) for v in unchanged_from(taken[1]))
        ):
            slot, held = taken
            return ModuleSite(event.name, "input", slot, event.call, scope.view(held), held.overwritten)
    site = flow.site(value)
    assert site is not None, "an addition is made by an operation"
    return site


def _written(scope: Scope, short: str, step: Step | None, found: Streams) -> None:
    write = write_of(scope, step.side) if step is not None and step.side is not None else None
    if write is None:
        found.absent[f"{short}_stream_write"] = "no weights per stream write this sublayer's output to the streams"
        return
    site = coefficients(scope, [write[1]])
    if site is not None:
        found.sites[f"{short}_stream_write"] = site


def name_moves(scope: Scope, flow: Flow, added: Contributions, found: Streams) -> None:
    """Say of each way around a sublayer which matrix mixes the streams there, and that sublayers write by weight."""
    mixes = [step for step in flow.steps or () if step.kind == "mix"]
    for short in ("attn", "mlp"):
        attribute, point = ("to_mid" if short == "attn" else "to_post"), f"{short}_stream_mix"
        moves: tuple[Move, ...] | None = getattr(added, attribute)
        here = [m for m in moves or () if m.kind == "mix"]
        if not here:
            found.absent[point] = "the streams of this block are not mixed: each keeps what it holds"
        if moves is None or len(here) > 1:
            setattr(added, attribute, None)
            continue
        if here:
            side = mixes.pop(0).side
            site = coefficients(scope, unchanged_from(side)) if side is not None else None
            if site is not None:
                found.sites[point] = site
        setattr(added, attribute, tuple(_named(m, point, found) for m in moves))


def _named(move: Move, mix: str, found: Streams) -> Move:
    if move.kind == "mix":
        return replace(move, name=mix)
    weights = move.name.replace("_out_post", "_stream_write")
    return replace(move, kind="write") if move.kind == "add" and weights in found.sites else move


def coefficients(scope: Scope, values: Sequence[Value], view: View | None = None) -> Site | None:
    """Where coefficients are read: as a module returns them, else where they are computed."""
    held = [site for v in values if v.tensor.dim() > 2 and (site := scope.holder(v)) is not None]
    if held and view is None:
        return held[0]
    made = values[-1].producer
    return op_site(scope, made, view or View(), values[-1].overwritten) if made is not None else None


def _read(scope: Scope, short: str, sublayer: Found, found: Streams) -> None:
    """The vector a sublayer reads, and the weights with which it is summed from the streams."""
    point = f"{short}_stream_collapse"
    handed = hidden_input(sublayer.module) if sublayer.module is not None else None
    if handed is None:
        found.absent[point] = "what reads the streams here is no module"
        return
    bare, _ = scaled(handed[1])
    norm = scope.norm_giving(handed[1]) or scope.norm_giving(bare)
    taken = hidden_input(norm) if norm is not None else handed
    reader = norm if norm is not None else sublayer.module
    assert taken is not None, "a norm is told by what it is handed"
    assert reader is not None
    read = _weighted(scope, taken[1])
    if read is None:
        found.absent[point] = "it is no weighted sum of the streams that could be followed"
        return
    weights, summed, factor = read
    made = weights.producer
    if made is None:
        found.absent[point] = "its weights are computed by no operation of this block"
        return
    found.beside[f"{short}_read"] = op_site(scope, made, View("raw"), weights.overwritten)
    found.constants[f"{short}_read_scale"] = factor
    normed = next((n for v in unchanged_from(summed) if (n := scope.norm_giving(v)) is not None), None)
    if normed is not None:
        found.modules[f"{short}_read_norm"] = normed.name
    slot, value = taken
    found.sites[point] = ModuleSite(reader.name, "input", slot, reader.call, scope.view(value), value.overwritten)


def _weighted(scope: Scope, value: Value) -> tuple[Value, Value, float] | None:
    """The weights, the stack and the constant whose sum over the streams is `value`."""
    assert scope.stack is not None
    total = unchanged_from(value)[-1].producer
    if total is None or total.name not in ("sum", "mean") or not total.inputs:
        return None
    product = unchanged_from(total.inputs[0][1])[-1].producer
    if product is None or product.name not in PRODUCTS or len(product.inputs) != 2:
        return None
    operands = [v for _, v in product.inputs]
    factor = 1 / scope.stack.streams if total.name == "mean" else 1.0
    for weights, stack in (operands, operands[::-1]):
        if scope.is_stack(stack) and _comes_from_streams(scope, stack):
            return weights, stack, factor
    return None


def _comes_from_streams(scope: Scope, value: Value) -> bool:
    """It is the stack that a child of the block was handed, or the norm of that."""
    chain = unchanged_from(value)
    norm = next((n for v in chain if (n := scope.norm_giving(v)) is not None), None)
    taken = hidden_input(norm) if norm is not None else None
    end = chain[-1] if taken is None else unchanged_from(taken[1])[-1]
    readers = [taken[1] for e in scope.calls if (taken := hidden_input(e)) is not None and scope.is_stack(taken[1])]
    return any(same(end, v) or v is end for r in [scope.residual[1], *readers] for v in unchanged_from(r))


def stream_outlets(scope: Scope, after: Sequence[Event]) -> dict[str, str]:
    """The linear maps that each read one of the last block's streams before they are merged: ``stream_out.K``."""
    out = scope.run.output()
    assert scope.stack is not None, "asked for where the residual is a stack"
    assert out is not None, "a block run is chosen by having one"
    stack, found = scope.stack.read(out.data, 1), dict[str, str]()
    for event in after:
        taken = _taken(event)
        if taken is None or not is_linear(event) or taken.shape != stack[..., 0, :].shape:
            continue
        for k in range(scope.stack.streams):
            if torch.equal(stack[..., k, :], taken.data):
                found[f"stream_out.{k}"] = event.name
    return found


def _taken(event: Event) -> Value | None:
    found = hidden_input(event)
    return None if found is None else found[1]


def _width(value: Value | None) -> int | None:
    return None if value is None else value.shape[-1]
