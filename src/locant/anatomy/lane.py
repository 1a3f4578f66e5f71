"""Find a block whose sublayers read and write one of several residual streams, and then tell the others.

AltUp (Baykal et al. 2023): the block predicts all streams by mixing them, computes on one of them as a block with a
single residual would, and corrects every stream by its own multiple of what that changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from locant.anatomy.anatomy import Move
from locant.anatomy.residual import Flow, Step, unchanged_from, write_of
from locant.anatomy.sites import Site, View
from locant.anatomy.streams import Streams, coefficients
from locant.anatomy.structure import ADDITIONS, DIFFERENCES, Scope, hidden_input, input_site
from locant.anatomy.trace import Event, Value, same


@dataclass(slots=True)
class Lane:
    """The stream that the sublayers of one block read and write.

    Attributes:
        scope: the block as if that stream were its residual.
        index: which of the mixed streams it is.
        beyond: what is added to some streams behind the sublayers.
    """

    scope: Scope
    flow: Flow
    index: int
    mix: Step
    weights: Value
    outer: Flow
    beyond: tuple[Move, ...] = ()
    beside: dict[str, Site] = field(default_factory=dict)


def find_lane(scope: Scope, flow: Flow) -> Lane | None:
    """The lane of a block that mixes its streams and adds to each a multiple of what one of them became."""
    steps = flow.steps or []
    if [step.kind for step in steps] != ["mix", "add"] or steps[1].side is None:
        return None
    write = write_of(scope, steps[1].side)
    difference = write[0].producer if write is not None else None
    if write is None or difference is None or difference.name not in DIFFERENCES or len(difference.inputs) != 2:
        return None
    after, before = (v for _, v in difference.inputs)
    assert scope.stack is not None, "streams are mixed where there are several"
    mixed = scope.stack.read(steps[0].value.data, 1)
    index = next((k for k in range(scope.stack.streams) if torch.equal(mixed[..., k, :], before.data)), None)
    if index is None:
        return None
    inner = Scope(scope.trace, scope.run, lane=(before, after))
    lane = Lane(inner, Flow(inner), index, steps[0], write[1], flow)
    lane.beyond = _beyond(scope, flow, lane.beside)
    return lane


def find_lane_streams(scope: Scope, lane: Lane, norm: Event | None) -> Streams:
    """The stream points of a block with a lane; `norm` is the one its attention reads through."""
    found = Streams(beside=dict(lane.beside))
    site = coefficients(scope, [lane.weights])
    if site is not None:
        found.sites["mlp_stream_write"] = site
    side = lane.mix.side
    site = coefficients(scope, [side], View(diagonal=lane.mix.factor)) if side is not None else None
    if site is not None:
        found.sites["attn_stream_mix"] = site
    if norm is not None and same((hidden_input(norm) or (None, None))[1], lane.scope.residual[1]):
        found.sites["attn_stream_collapse"] = input_site(norm)
    found.absent["attn_stream_write"] = (
        "attention writes to one vector here; mlp_stream_write tells the streams of both"
    )
    found.absent["mlp_stream_collapse"] = "the MLP reads resid_mid here, one vector that attention has written to"
    found.absent["mlp_stream_mix"] = "the streams are mixed once in this block: attn_stream_mix"
    return found


def _beyond(scope: Scope, flow: Flow, beside: dict[str, Site]) -> tuple[Move, ...]:
    """What is added in place to some of the streams once the block's output is made."""
    out = scope.run.output()
    if out is None or scope.stack is None or scope.stack.layout != "streams_first":
        return ()
    moves: list[Move] = []
    memory, made = out.tensor.untyped_storage().data_ptr(), max(e.index for e in _makers(out))
    for event in scope.events:
        if not event.is_op or event.name not in ADDITIONS or event.index <= made or len(event.inputs) != 2:
            continue
        part, side = (v for _, v in event.inputs)
        if part.tensor.untyped_storage().data_ptr() != memory:
            continue
        since = int(part.tensor.storage_offset() - out.tensor.storage_offset()) // out.tensor.stride(0)
        site = flow.site(side)
        if site is not None and part.shape[0] == scope.stack.streams - since:
            name = f"beyond.{len(moves)}"
            beside[name] = site
            moves.append(Move("add", name, since=since))
    return tuple(moves)


def _makers(value: Value) -> list[Event]:
    return [v.producer for v in unchanged_from(value) if v.producer is not None]
