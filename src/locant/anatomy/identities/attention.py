"""Equations of a token mixer with heads, from the residual it reads to what it adds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from locant.anatomy.anatomy import Gate
from locant.anatomy.evidence import Equation, Evidence
from locant.anatomy.identities.residual import contribution
from locant.anatomy.identities.table import identity
from locant.anatomy.sites import wide


@identity("attn_input", "attn_in = scale · norm(resid_pre), of several streams norm(attn_stream_collapse)")
def _attn_input(e: Evidence) -> list[Equation]:
    if not e.has("attn_in"):
        return []
    name = "attn_stream_collapse" if e.facts.n_streams > 1 else "resid_pre"
    if not e.has(name):
        return []
    residual = e.moved(e.get(name), e.part.to_attn)
    normed = e.call("attn_norm", residual) if e.plays("attn_norm") else residual
    normed = normed * e.part.constants.get("attn_in_scale", 1.0)
    return [e.equal(e.get("attn_in"), normed, "attn_in", name)]


@identity("projection", "query, key, value = W attn_in (+ b)")
def _projection(e: Evidence) -> list[Equation]:
    found = []
    for name in ("query", "key", "value"):
        role = f"w_{name[0]}"
        if not e.has(name, "attn_in") or not e.plays(role):
            continue
        projected, channels = e.call(role, e.get("attn_in")), e.channels(name)
        wanted = projected if channels is None else channels.read(projected)
        found.append(e.equal(e.get(name), wanted, name, "attn_in"))
        normed = f"{name[0]}_norm_in"
        if name != "value" and e.has(normed) and f"{name[0]}_norm_late" not in e.part.constants:
            found.append(e.equal(e.get(normed), wanted, normed, "attn_in"))
    return found


@identity("qk_norm", "q_norm_out = norm(q_norm_in), k_norm_out = norm(k_norm_in)")
def _qk_norm(e: Evidence) -> list[Equation]:
    found = []
    for short in ("q", "k"):
        names = (f"{short}_norm_in", f"{short}_norm_out")
        if not e.has(*names):
            continue
        before, after = map(e.get, names)
        site = e.part.sites[names[0]]
        if site.view.layout == "tokens":
            normed = e.call(f"{short}_norm", before)
        else:
            heads = e.facts.n_heads if short == "q" else e.facts.n_kv_heads
            axes = (2, 1) if site.view.layout == "heads_first" else (1, 1)
            by_head = before.unflatten(-1, (heads or 1, -1)).transpose(*axes)
            normed = e.call(f"{short}_norm", by_head).transpose(*axes).flatten(-2)
        found.append(e.equal(after, normed, *names))
    return found


@identity("rotation", "query_rotated = scale · R(position) query: equal at position 0, of equal length everywhere")
def _rotation(e: Evidence) -> list[Equation]:
    found = []
    for name in ("query", "key"):
        normed = [f"{name[0]}_norm_in", f"{name[0]}_norm_out"]
        late = f"{name[0]}_norm_late" in e.part.constants
        pairs = [(normed[1] if e.has(normed[1]) and not late else name, f"{name}_rotated")]
        if late:  # rotated first, normed after
            pairs = [(name, normed[0]), (normed[1], f"{name}_rotated")]
        for names in pairs:
            if e.has(*names):
                found += _rotated(e, names, e.part.constants.get(f"{name}_clip"))
    return found


def _rotated(e: Evidence, names: tuple[str, str], clip: float | None) -> list[Equation]:
    before, after = map(e.by_head, names)
    before = before if clip is None else before.clamp(-clip, clip)
    before = before * _one_scale(before[:, :, 0], after[:, :, 0])
    start = _at_start(e, before[:, :, 0], after[:, :, 0], names)
    return [start, e.equal(after.norm(dim=-1), before.norm(dim=-1), *names)]


def _one_scale(before: Tensor, after: Tensor) -> float:
    """The one number some families scale all queries (or keys) by before they attend; 1 for most."""
    scale = float(after.norm() / before.norm().clamp_min(1e-30))
    return 1.0 if abs(scale - 1) < 1e-2 else scale


def _at_start(e: Evidence, before: Tensor, after: Tensor, names: tuple[str, str]) -> Equation:
    """Position 0 is rotated by nothing; some families change the order of a head's channels on the way."""
    as_is = e.equal(after, before, *names)
    reordered = e.equal(after.sort(-1).values, before.sort(-1).values, *names)
    return as_is if as_is.error <= 2 * reordered.error else reordered


@identity(
    "scores",
    "attn_scores = scale · query_rotated · key_rotated (+ slope · distance), capped, masked; with sinks up to a shift "
    "of each row",
)
def _scores(e: Evidence) -> list[Equation]:
    names = ("attn_scores", "query_rotated", "key_rotated")
    if not e.has(*names):
        return []
    query, key = e.by_head("query_rotated"), e.by_head("key_rotated")
    scores = wide(e.get("attn_scores"))
    if query.shape[1] % key.shape[1] or scores.shape[:3] != query.shape[:3]:
        return [e.fails(*names)]
    product = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
    seen = scores > _MASKED
    future = torch.ones_like(seen[0, 0]).triu(1)
    if bool((seen & future).any()):
        return [e.fails(*names)]
    if e.part.sites["attn_scores"].view.sinks or "score_shift" in e.part.constants:
        product, scores = (_centred(t, seen) for t in (product, scores))  # its softmax is handed shifted rows
    rebuilt = _scaled(product, scores, seen, e.part.constants.get("score_cap"))
    none = torch.zeros_like(scores)
    equation = e.equal(torch.where(seen, rebuilt, none), torch.where(seen, scores, none), *names)
    if equation.error > 1e-2 and scores.shape[-1] > 4:
        product, scores = (_centred(t, seen) for t in (product, scores))
        biased = e.equal(_with_distance(product, scores, seen), scores, *names)
        equation = min(equation, biased, key=lambda q: q.error)
    return [equation]


_MASKED = -9e3
"""No score of a token that is seen is as low; families mask with this much or more."""


def _with_distance(product: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """One scale for `product` and one slope a head for the key's position, as they come closest to `scores`.

    All rows are centred: what is the same for a whole row, no softmax sees (Press et al. 2022, section 3).
    """
    n_heads = scores.shape[1]
    place = torch.arange(scores.shape[-1], dtype=scores.dtype, device=scores.device).expand_as(scores)
    place = _centred(place, seen)
    slopes = torch.eye(n_heads, dtype=scores.dtype, device=scores.device)[None, :, None, None] * place[..., None]
    columns = torch.cat([product[..., None], slopes], -1)
    solution = torch.linalg.lstsq(columns.flatten(0, -2), scores.flatten()[:, None]).solution
    return (columns @ solution).squeeze(-1)


def _centred(rows: Tensor, seen: Tensor) -> Tensor:
    """Rows less their mean over the entries seen, zero elsewhere."""
    rows = torch.where(seen, rows, torch.zeros_like(rows))
    return torch.where(seen, rows - rows.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True), torch.zeros_like(rows))


def _scaled(product: Tensor, scores: Tensor, seen: Tensor, cap: float | None) -> Tensor:
    """`product` times the one number that brings it closest to `scores`, then capped."""
    linear = scores if cap is None else cap * torch.atanh((scores / cap).clamp(-0.9999999, 0.9999999))
    x, y = product[seen], linear[seen]
    scaled = product * ((x @ y) / (x @ x).clamp_min(1e-30))
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


@identity("softmax", "attn_probs = softmax(attn_scores), less the share of sinks")
def _softmax(e: Evidence) -> list[Equation]:
    if not e.has("attn_scores", "attn_probs"):
        return []
    probs = wide(e.get("attn_scores")).softmax(-1)
    if e.part.sites["attn_scores"].view.sinks:  # a sink takes its share of every row
        share = wide(e.get("attn_probs")).sum(-1, keepdim=True)
        probs = probs * share
        if bool((share > 1 + 1e-3).any()):
            return [e.fails("attn_probs", "attn_scores")]
    return [e.equal(e.get("attn_probs"), probs, "attn_probs", "attn_scores")]


@identity("mixing", "z = attn_probs · value, per head (times the gate)")
def _mixing(e: Evidence) -> list[Equation]:
    names = ("z", "attn_probs", "value")
    if not e.has(*names):
        return []
    probs, value = wide(e.get("attn_probs")), e.by_head("value")
    if probs.shape[1] % value.shape[1]:
        return [e.fails(*names)]
    value = value.repeat_interleave(probs.shape[1] // value.shape[1], 1)
    summed = (probs @ value.abs()).transpose(1, 2).flatten(-2)  # what rounding is relative to, where terms cancel
    mixed = (probs @ value).transpose(1, 2).flatten(-2)
    if e.part.gate is not None and e.has("attn_gate"):
        gate = _opened(e.get("attn_gate"), e.part.gate, mixed.shape[-1])
        mixed, summed, names = mixed * gate, summed * gate.abs(), (*names, "attn_gate")
    elif "z_factor" in e.part.beside:
        factor = _aligned(e.get("z_factor"), mixed, value.shape[1])
        mixed, summed = mixed * factor, summed * factor.abs()
    if e.plays("z_norm"):
        return [e.equal(e.get("z"), e.call("z_norm", mixed.to(e.get("z").dtype)), *names)]
    return [e.equal(e.get("z"), mixed, *names, size=summed.amax(-1, keepdim=True))]


def _aligned(factor: Tensor, mixed: Tensor, n_heads: int) -> Tensor:
    """A factor ``[batch, head, pos, ...]`` or ``[batch, pos, head, ...]`` as ``[batch, pos, width]``."""
    factor = wide(factor)
    if factor.dim() == 4 and factor.shape[1] == n_heads != factor.shape[2]:
        factor = factor.transpose(1, 2)
    factor = factor.reshape(*mixed.shape[:2], -1)
    return factor.repeat_interleave(mixed.shape[-1] // factor.shape[-1], -1)


def _opened(projected: Tensor, gate: Gate, width: int) -> Tensor:
    """The factor of each number of ``z``; a gate of one number a head holds for all the head's numbers."""
    argument = wide(projected if gate.channels is None else gate.channels.read(projected))
    function: Callable[[Tensor], Tensor] = getattr(torch.nn.functional, gate.op)
    return function(argument).repeat_interleave(width // argument.shape[-1], -1)


@identity("attn_output", "attn_out = W_O z (+ b)", doubt_from=("attn_out",))
def _attn_output(e: Evidence) -> list[Equation]:
    if not e.has("z", "attn_out"):
        return []
    return [e.equal(e.get("attn_out"), e.call("w_o", e.get("z")), "attn_out", "z")]


@identity("attn_contribution", "attn_out_post = scale · norm(attn_out)", doubt_from=("attn_out_post",))
def _attn_contribution(e: Evidence) -> list[Equation]:
    return contribution(e, "attn")
