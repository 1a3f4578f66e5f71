"""IDENTITIES: one row per equation that holds between the points of one forward.

Which identities must hold for a point to count as proven stands in POINTS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locant.address import Address
from locant.anatomy.anatomy import Gate, Move
from locant.anatomy.evidence import Equation, Evidence
from locant.anatomy.sites import wide
from locant.anatomy.structure import CALL_ERRORS
from locant.points import POINTS

Measure = Callable[[Evidence], list[Equation]]


@dataclass(frozen=True, slots=True)
class Identity:
    """An equation between points.

    Attributes:
        formula: as people write it.
        measure: its instances at one layer; none where it does not apply.
        doubt_from: the members whose refusal refuses the others, since two tensors read at wrong places may agree;
            ``None`` for all of them. With none, the equation is evidence by itself: the block's input is the last
            block's output, whatever that is made of.
    """

    name: str
    formula: str
    measure: Measure
    doubt_from: tuple[str, ...] | None = None


IDENTITIES: dict[str, Identity] = {}


def _identity(name: str, formula: str, *, doubt_from: tuple[str, ...] | None = None) -> Callable[[Measure], Measure]:
    def add(measure: Measure) -> Measure:
        IDENTITIES[name] = Identity(name, formula, measure, doubt_from)
        return measure

    return add


# ------------------------------------------------------------------------------------------------ the trunk


@_identity("embedding", "embeddings = W_E[tokens]")
def _embedding(e: Evidence) -> list[Equation]:
    if not e.has("embeddings"):
        return []
    return [e.equal(e.get("embeddings"), e.call("embedding", e.ids), "embeddings")]


@_identity("final_norm", "final_norm = norm(resid_post.last)", doubt_from=())
def _final_norm(e: Evidence) -> list[Equation]:
    trunk, block = e.at(None), e.at(e.last)
    if not trunk.has("final_norm") or not block.has("resid_post"):
        return []
    normed = trunk.call("final_norm", block.get("resid_post"))
    return [trunk.equal(trunk.get("final_norm"), normed, "final_norm", others=(block.address("resid_post"),))]


@_identity("unembedding", "lm_head = W_U (scale · final_norm)", doubt_from=())
def _unembedding(e: Evidence) -> list[Equation]:
    scale = e.part.constants.get("unembedding_scale")
    if scale is None or not e.has("final_norm", "lm_head"):
        return []
    return [e.equal(e.get("lm_head"), e.call("lm_head", e.get("final_norm") * scale), "lm_head", "final_norm")]


@_identity("logits", "logits = cap(scale · lm_head)", doubt_from=())
def _logits(e: Evidence) -> list[Equation]:
    if not e.has("lm_head", "logits"):
        return []
    return [e.equal(e.get("logits"), e.anatomy.shape_logits(e.get("lm_head")), "logits", "lm_head")]


# ------------------------------------------------------------------------------------------------ the residual


@_identity(
    "chain",
    "resid_pre[0] = embeddings (+ position embedding); resid_pre[l+1] = resid_post[l]; "
    "final_norm = norm(resid_post[last])",
    doubt_from=(),
)
def _chain(e: Evidence) -> list[Equation]:
    assert e.layer is not None
    found = []
    if e.layer == 0:
        found += _first_residual(e)
    else:
        before = e.at(e.layer - 1)
        link = (before.address("resid_post"),)
        found.append(e.equal(e.get("resid_pre"), before.get("resid_post"), "resid_pre", others=link))
    if e.layer == e.last:
        return found + _final_norm(e)
    after = e.at(e.layer + 1)
    link = (after.address("resid_pre"),)
    return [*found, e.equal(after.get("resid_pre"), e.get("resid_post"), "resid_post", others=link)]


def _first_residual(e: Evidence) -> list[Equation]:
    entry, first = e.anatomy.entry, e.get("resid_pre")
    terms = [t for path in entry.summands if (t := e.output(path)) is not None]
    if not terms or len(terms) < len(entry.summands):
        return _mid_sum(e) or _block_sum(e)  # it is what the block adds to, whatever it is made of
    total = torch.stack([t.expand_as(first) for t in terms]).sum(0) * entry.scale
    made = e.call_path(entry.norm, total) if entry.norm else total
    return [e.equal(first, made, "resid_pre", others=(Address("embeddings"),))]


@_identity("mid_sum", "resid_mid = resid_pre + attn_out_post")
def _mid_sum(e: Evidence) -> list[Equation]:
    if not e.has("resid_mid", "attn_out_post"):
        return []
    moves = _ADDED[:1] if e.part.to_mid is None else e.part.to_mid
    return _for_raw(e, e.follows("resid_mid", "resid_pre", moves))


@_identity(
    "block_sum",
    "resid_post = resid_mid + mlp_out_post; in a parallel block resid_pre + attn_out_post + mlp_out_post; "
    "with the norm after the sum, norm(mlp_in + mlp_out_post)",
)
def _block_sum(e: Evidence) -> list[Equation]:
    start = "resid_mid" if e.has("resid_mid") else "resid_pre"
    moves = e.part.to_post
    if moves is None:
        moves = _ADDED[1:] if start == "resid_mid" else _ADDED
    if not e.has(*(m.name for m in moves if m.kind == "add" and m.name in POINTS)):
        return []
    return _for_raw(e, e.follows("resid_post", start, moves))


_ADDED = (Move("add", "attn_out_post"), Move("add", "mlp_out_post"))


def _for_raw(e: Evidence, equation: Equation) -> list[Equation]:
    """The equation, and again for each sublayer's raw output where that is what is added."""
    found = [equation]
    for sublayer in ("attn", "mlp"):
        raw, added = e.address(f"{sublayer}_out"), e.address(f"{sublayer}_out_post")
        if added in equation.members and e.has(raw.name):
            sites = e.part.sites[raw.name], e.part.sites[added.name]
            if sites[0] == replace(sites[1], view=replace(sites[1].view, scale=1.0)):
                found.append(replace(equation, members=frozenset([raw])))
    return found


# ------------------------------------------------------------------------------------------------ attention


@_identity("attn_input", "attn_in = scale · norm(resid_pre)")
def _attn_input(e: Evidence) -> list[Equation]:
    if not e.has("attn_in"):
        return []
    residual = e.get("resid_pre")
    normed = e.call("attn_norm", residual) if e.plays("attn_norm") else residual
    normed = normed * e.part.constants.get("attn_in_scale", 1.0)
    return [e.equal(e.get("attn_in"), normed, "attn_in", "resid_pre")]


@_identity("projection", "query, key, value = W attn_in (+ b)")
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


@_identity("qk_norm", "q_norm_out = norm(q_norm_in), k_norm_out = norm(k_norm_in)")
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


@_identity("rotation", "query_rotated = scale · R(position) query: equal at position 0, of equal length everywhere")
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


@_identity(
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


@_identity("softmax", "attn_probs = softmax(attn_scores), less the share of sinks")
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


@_identity("mixing", "z = attn_probs · value, per head (times the gate)")
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


@_identity("attn_output", "attn_out = W_O z (+ b)", doubt_from=("attn_out",))
def _attn_output(e: Evidence) -> list[Equation]:
    if not e.has("z", "attn_out"):
        return []
    return [e.equal(e.get("attn_out"), e.call("w_o", e.get("z")), "attn_out", "z")]


@_identity("attn_contribution", "attn_out_post = scale · norm(attn_out)", doubt_from=("attn_out_post",))
def _attn_contribution(e: Evidence) -> list[Equation]:
    return _contribution(e, "attn")


def _contribution(e: Evidence, sublayer: str) -> list[Equation]:
    names = (f"{sublayer}_out_post", f"{sublayer}_out")
    if not e.has(*names):
        return []
    value, added = e.get(names[1]), e.get(names[0])
    if e.plays(f"{sublayer}_post_norm"):
        value = e.call(f"{sublayer}_post_norm", value)
    equation = e.equal(added, value * e.part.sites[names[0]].view.scale, *names)
    if e.part.sites[names[0]] != e.part.sites[names[1]] and equation.error > 1e-2 and added.shape == value.shape:
        bias = (added - value).flatten(0, -2).mean(0)
        equation = min(equation, e.equal(added, value + bias, *names), key=lambda q: q.error)
    return [equation if e.plays(f"{sublayer}_post_norm") else e.by_construction(equation)]


# ------------------------------------------------------------------------------------------------ the MLP


@_identity("mlp_input", "mlp_in = norm(resid_mid), or norm(resid_pre) in a parallel block")
def _mlp_input(e: Evidence) -> list[Equation]:
    if not e.has("mlp_in"):
        return []
    name = "resid_mid" if e.has("resid_mid") else "resid_pre"
    residual = e.get(name)
    normed = e.call("mlp_norm", residual) if e.plays("mlp_norm") else residual
    return [e.equal(e.get("mlp_in"), normed, "mlp_in", name)]


@_identity("branches", "mlp_pre = W_gate mlp_in, mlp_pre_linear = W_in mlp_in")
def _branches(e: Evidence) -> list[Equation]:
    found = []
    for name, role in (("mlp_pre", "w_gate"), ("mlp_pre_linear", "w_up")):
        if not e.has(name, "mlp_in") or not e.plays(role):
            continue
        projected, channels = e.call(role, e.get("mlp_in")), e.channels(name)
        wanted = projected if channels is None else channels.read(projected)
        found.append(e.equal(e.get(name), wanted, name, "mlp_in"))
    return found


@_identity("activation", "mlp_act = act(mlp_pre) · mlp_pre_linear")
def _activation(e: Evidence) -> list[Equation]:
    if not e.has("mlp_pre", "mlp_act") or not e.plays("activation"):
        return []
    names = ["mlp_act", "mlp_pre"]
    value = e.call("activation", e.get("mlp_pre"))
    if e.has("mlp_pre_linear"):
        names.append("mlp_pre_linear")
        value = value * e.get("mlp_pre_linear")
    if e.plays("act_norm"):
        value = e.call("act_norm", value)
    return [e.equal(e.get("mlp_act"), value, *names)]


@_identity("mlp_output", "mlp_out = W_out mlp_act (+ b)", doubt_from=("mlp_out",))
def _mlp_output(e: Evidence) -> list[Equation]:
    if not e.has("mlp_act", "mlp_out"):
        return []
    return [e.equal(e.get("mlp_out"), e.call("w_down", e.get("mlp_act")), "mlp_out", "mlp_act")]


@_identity("mlp_contribution", "mlp_out_post = scale · norm(mlp_out)", doubt_from=("mlp_out_post",))
def _mlp_contribution(e: Evidence) -> list[Equation]:
    return _contribution(e, "mlp")


# ------------------------------------------------------------------------------------------------ experts


@_identity(
    "routing",
    "router_logits = router(mlp_in); expert_weights ∝ softmax or sigmoid of router_logits at expert_indices, or what "
    "the router makes of mlp_in",
)
def _routing(e: Evidence) -> list[Equation]:
    names = ("router_logits", "expert_weights", "expert_indices")
    if not e.has(*names):
        return []
    logits, weights, indices = wide(e.get(names[0])), wide(e.get(names[1])), e.get(names[2])
    routed = _routed(e)
    made = [e.equal(logits, x.reshape(logits.shape), names[0], "mlp_in") for x in routed if x.numel() == logits.numel()]
    kinds = [kind.gather(-1, indices) for kind in (logits.softmax(-1), logits.sigmoid())]
    scaled = [kind * (weights.sum(-1, keepdim=True) / kind.sum(-1, keepdim=True)) for kind in kinds]
    if not torch.allclose(logits.sum(-1), torch.ones_like(logits[..., 0]), atol=1e-3):  # else these are shares already
        scaled += [x.reshape(weights.shape) for x in routed if x.numel() == weights.numel()]
    chosen = [e.equal(weights, wanted, *names) for wanted in scaled]
    return [min(found, key=lambda q: q.error) for found in (made, chosen) if found]


def _routed(e: Evidence) -> list[Tensor]:
    """What the router gives for the MLP's input, called by hand."""
    if not e.has("mlp_in") or not e.plays("router"):
        return []
    try:
        result = e.call("router", e.get("mlp_in").flatten(0, 1))
    except CALL_ERRORS:
        return []  # it is handed more than the hidden states
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]


@_identity(
    "expert_sum",
    "mlp_out = scale · Σ expert_weights · expert(mlp_in) over expert_indices (+ scale · shared expert)",
    doubt_from=(),
)
def _expert_sum(e: Evidence) -> list[Equation]:
    names = ("mlp_out", "mlp_in", "expert_indices", "expert_weights")
    if not e.has(*names) or not e.plays("experts"):
        return []
    out = e.get("mlp_out")
    constants = e.part.constants
    rebuilt = e.call("experts", *(e.get(name).flatten(0, 1) for name in names[1:])).reshape(out.shape)
    rebuilt = rebuilt * constants.get("experts_scale", 1.0)
    if e.plays("shared"):
        shared = e.call("shared", e.get("mlp_in"))
        if e.plays("shared_gate"):
            shared = shared * e.call("shared_gate", e.get("mlp_in")).sigmoid()
        rebuilt = rebuilt + shared * constants.get("shared_scale", 1.0)
    return [e.equal(rebuilt, out, *names)]
