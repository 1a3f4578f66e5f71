"""What is true of several residual streams: how a sublayer reads them, and how they are mixed and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from locant.anatomy.anatomy import Move
from locant.anatomy.evidence import TOLERANCE, Equation, Evidence
from locant.anatomy.sites import wide


def read_of_streams(e: Evidence) -> list[Equation]:
    """What each sublayer reads is the sum of the streams, or of their norm, each with its weight."""
    if e.part.lane is not None:
        names = ("attn_stream_collapse", "resid_pre", "attn_stream_mix")
        if not e.has(*names):
            return []
        mixed = _mixed(e, e.get("attn_stream_mix"))[..., e.part.lane, :]
        return [e.equal(e.get(names[0]), mixed, *names[:2])]
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
    if e.plays("stream_head"):
        return e.call("stream_head", _as_held(e.at(e.last), "resid_post", stack))
    return _within(stack, e)


def _within(stack: Tensor, e: Evidence) -> Tensor:
    """The sum of the streams, each through its own map where it has one, that comes closest to what was merged.

    Its weights, one for each stream of a token, are solved for: many fewer than the numbers they have to make.
    """
    maps = [f"stream_out.{k}" for k in range(stack.shape[-2])]
    columns = [e.call(m, stack[..., k, :]) if e.plays(m) else stack[..., k, :] for k, m in enumerate(maps)]
    basis, given = wide(torch.stack(columns, -1)).cpu(), wide(e.get("merged"))[..., None].cpu()
    return (basis @ torch.linalg.lstsq(basis, given).solution).squeeze(-1).to(stack)


def lane_sum(e: Evidence, moves: Sequence[Move]) -> list[Equation]:
    """Every stream of the mixed stack plus its weight times what attention and MLP added to the stream they read."""
    coefficients = {name: e.get(name) for name in ("attn_stream_mix", "mlp_stream_write")}
    start = e.get("attn_stream_collapse")
    change = e.moved(e.get("resid_mid"), moves) - start
    whole = e.get("resid_post").clone()
    for move in e.part.beyond:
        whole[..., move.since :, :] -= e.get(move.name)[..., None, :]
    added = [m.name for m in moves if m.kind == "add" and m.name not in e.part.beside]
    names = ["resid_post", "resid_pre", "resid_mid", "attn_stream_collapse", *added]

    def terms(used: Mapping[str, Tensor]) -> list[Tensor]:
        return [_mixed(e, used["attn_stream_mix"]), used["mlp_stream_write"][..., None] * change[..., None, :]]

    def rest(used: Mapping[str, Tensor]) -> float:
        return float((wide(whole) - torch.stack([wide(t) for t in terms(used)]).sum(0)).pow(2).mean())

    noise = rest(coefficients)
    return _told_apart(
        e,
        e.summed(whole, terms(coefficients), *names),
        coefficients,
        lambda used: rest(used) <= 4 * noise,  # in a narrow dtype all tokens together tell what no row of one does
    )


def _mixed(e: Evidence, mix: Tensor) -> Tensor:
    stack = e.get("resid_pre")
    return torch.matmul(mix.transpose(-1, -2), stack.to(mix.dtype)).to(stack.dtype)


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

    def alike(used: Mapping[str, Tensor]) -> bool:
        if exact:
            return _exact(whole, e, start, moves, used)
        return e.summed(whole, _terms(e, start, moves, used), *names).error <= TOLERANCE[e.dtype]

    return _told_apart(e, equation, coefficients, alike)


def _told_apart(
    e: Evidence,
    equation: Equation,
    coefficients: Mapping[str, Tensor],
    alike: Callable[[Mapping[str, Tensor]], bool],
) -> list[Equation]:
    """The equation, and one for each coefficient: vacuous where the same taken the wrong way round holds as well."""
    found = [equation]
    for name, own in coefficients.items():
        wrong = own.roll(1, -1) if name.endswith("_write") else own.transpose(-1, -2)
        vacuous = equation.vacuous or alike({**coefficients, name: wrong})
        found.append(replace(equation, members=equation.members | {e.address(name)}, vacuous=vacuous))
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
