"""What is true of several residual streams: how a sublayer reads them, and how they are mixed and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from locant.anatomy.anatomy import Move
from locant.anatomy.evidence import TOLERANCE, Equation, Evidence


def read_of_streams(e: Evidence) -> list[Equation]:
    """What each sublayer reads is the sum of the streams, or of their norm, each with its weight."""
    found = []
    for short, start, moves in (("attn", "resid_pre", e.part.to_mid), ("mlp", "resid_mid", e.part.to_post)):
        point, weights = f"{short}_stream_collapse", f"{short}_read"
        if not e.has(point, start) or weights not in e.part.beside:
            continue
        stack = e.get(start)
        for move in moves or ():
            if move.kind != "add":
                break
            stack = stack + e.get(move.name)
        if e.plays(f"{short}_read_norm"):
            laid_out = e.call(f"{short}_read_norm", _as_held(e, start, stack))
            stack = e.part.sites[start].view.read(laid_out, stack.shape[0])
        read = e.get(weights).reshape(*stack.shape[:3], -1)
        total = (read * stack).sum(-2) * e.part.constants[f"{short}_read_scale"]
        found.append(e.equal(e.get(point), total.to(e.get(point).dtype), point, start))
    return found


def _as_held(e: Evidence, name: str, stack: Tensor) -> Tensor:
    """A stack ``[batch, pos, stream, d]`` as the model lays it out."""
    layout = e.part.sites[name].view.layout
    return (
        stack.movedim(2, 0) if layout == "streams_first" else stack.flatten(-2) if layout == "streams_flat" else stack
    )


def merged(e: Evidence, stack: Tensor) -> Tensor:
    """What the trunk makes of the last block's streams before its final norm, or in place of it."""
    return e.call("stream_head", _as_held(e.at(e.last), "resid_post", stack))


def stream_sum(e: Evidence, total: str, start: str, moves: Sequence[Move]) -> list[Equation]:
    """The stack `total` is the mixed stack `start` and what was written to each of its streams.

    A coefficient has its own instance, in which it proves nothing where weights of another stream, or the matrix
    taken the other way round, would do as well.
    """
    whole = e.get(total)
    written = [m.name for m in moves if m.kind == "write"]
    weights = [name.replace("_out_post", "_stream_write") for name in written]
    matrices = [m.name for m in moves if m.kind == "mix"]
    coefficients = {name: e.get(name) for name in [*weights, *matrices]}
    names = (total, start, *written)
    equation = e.summed(whole, _terms(e, start, moves, coefficients), *names)
    exact = _exact(whole, e, start, moves, coefficients)
    found = [equation]
    for name, own in coefficients.items():
        swapped = coefficients | {name: own.roll(1, -1) if name in weights else own.transpose(-1, -2)}
        if exact:
            alike = _exact(whole, e, start, moves, swapped)
        else:
            alike = e.summed(whole, _terms(e, start, moves, swapped), *names).error <= TOLERANCE[e.dtype]
        members = frozenset([*equation.members, e.address(name)])
        found.append(replace(equation, members=members, vacuous=equation.vacuous or alike))
    return found


def _exact(whole: Tensor, e: Evidence, start: str, moves: Sequence[Move], coefficients: Mapping[str, Tensor]) -> bool:
    """The terms give `whole` bit for bit, added in its own dtype or in float32."""
    for dtype in (whole.dtype, torch.float32):
        terms = _terms(e, start, moves, coefficients, dtype)
        if any(torch.equal(sum(order[1:], order[0]).to(whole.dtype), whole) for order in (terms, terms[::-1])):
            return True
    return False


def _terms(
    e: Evidence, start: str, moves: Sequence[Move], coefficients: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    dtype = dtype or e.get(start).dtype
    terms = [e.get(start).to(dtype)]
    for move in moves:
        if move.kind == "add":
            terms.append(e.get(move.name).to(dtype))
        elif move.kind == "write":
            vector = e.get(move.name).to(dtype)
            weights = coefficients[move.name.replace("_out_post", "_stream_write")].to(dtype)
            terms.append(weights[..., None] * vector[..., None, :])
        elif move.kind == "mix":
            matrix = coefficients[move.name].to(dtype).transpose(-1, -2)
            terms = [torch.matmul(matrix, term) for term in terms]
        else:
            raise ValueError(f"streams that pass through a {move.kind} are not followed")
    return terms
