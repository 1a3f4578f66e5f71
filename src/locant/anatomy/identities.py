"""IDENTITIES: one row per equation that holds between points of one forward, and how far from it a model is.

An error is relative and taken row by row (one position at a time): the first position often carries an
activation a hundred times larger than the rest, and one scale for all would hide every other row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.address import Address
from locant.anatomy.anatomy import Anatomy, Part


@dataclass(frozen=True, slots=True)
class Measured:
    """How far one identity is from holding.

    Attributes:
        vacuous: it would hold whatever the tensors are (a zero-initialised projection).
        points: the points it speaks of here, where that is not every point it can prove.
    """

    error: float
    vacuous: bool = False
    points: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Identity:
    """An equation between points.

    Attributes:
        formula: as people write it.
        measure: its error at one layer, ``None`` where it does not apply.
    """

    name: str
    formula: str
    measure: Callable[[Evidence, int | None], Measured | None]


class Evidence:
    """The tensors of one forward, and the model's own modules to recompute them by hand."""

    def __init__(
        self,
        anatomy: Anatomy,
        tape: Mapping[Address, Tensor],
        ids: Tensor,
        module: Callable[[str], nn.Module],
    ) -> None:
        self.anatomy = anatomy
        self.ids = ids
        self._tape = tape
        self._module = module

    def has(self, layer: int | None, *names: str) -> bool:
        return all(self._key(n, layer) in self._tape for n in names)

    def get(self, name: str, layer: int | None) -> Tensor:
        return self._tape[self._key(name, layer)]

    def output(self, path: str) -> Tensor | None:
        """A module's own output in this forward, if it was read."""
        return self._tape.get(Address.of_module(path))

    def part(self, layer: int | None) -> Part:
        return self.anatomy.part(layer)

    def call(self, role: str, layer: int | None, *args: Any) -> Any:
        """Call by hand the module that plays `role` there; the first of its arguments decides the device."""
        module = self._module(self.part(layer).modules[role])
        weight = next(module.parameters(), None)
        if weight is not None and weight.device.type != "meta":
            args = tuple(a.to(weight.device) if isinstance(a, Tensor) else a for a in args)
        result = module(*args)
        return result.to(self.ids.device) if isinstance(result, Tensor) else result

    @staticmethod
    def _key(name: str, layer: int | None) -> Address:
        return Address(name, layer)


IDENTITIES: dict[str, Identity] = {}


def _identity(name: str, formula: str) -> Callable[[Any], Any]:
    def add(measure: Callable[[Evidence, int | None], Measured | None]) -> Any:
        IDENTITIES[name] = Identity(name, formula, measure)
        return measure

    return add


def _equal(got: Tensor, want: Tensor, points: tuple[str, ...] = ()) -> Measured:
    """The largest error of a row, relative to the row's largest value."""
    if got.shape != want.shape:
        return Measured(float("inf"), points=frozenset(points))
    a, b = got.float(), want.float()
    scale = b.abs().amax(-1, keepdim=True)
    floor = 1e-4 * scale.max()
    error = ((a - b).abs() / scale.clamp_min(floor).clamp_min(1e-30)).max()
    return Measured(_finite(error), bool(scale.max() == 0), frozenset(points))


def _sum(total: Tensor, terms: tuple[Tensor, ...], points: tuple[str, ...] = ()) -> Measured:
    """How well `terms` add up to `total`, relative to the smallest term that matters.

    A contribution far smaller than the residual could be anything within the rounding of the sum, so a row counts
    only where its last term stands out of that rounding; where none does, the identity proves nothing.
    """
    step = torch.finfo(total.dtype).eps
    wide = [t.float() for t in terms]
    rest = total.float() - sum(wide)  # type: ignore[operator]
    rounding = 4 * step * torch.stack([t.abs() for t in (*wide, total.float())]).amax(0).amax(-1)
    size = torch.stack([t.abs().amax(-1) for t in wide]).amin(0)
    excess = (rest.abs().amax(-1) - rounding).clamp_min(0)
    telling = size > 10 * rounding
    if not bool(telling.any()):
        trivial = bool((excess == 0).all())
        return Measured(0.0 if trivial else float("inf"), trivial, frozenset(points))
    return Measured(_finite((excess / size.clamp_min(1e-30))[telling].max()), points=frozenset(points))


def _finite(error: Tensor) -> float:
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def _worst(results: list[Measured]) -> Measured | None:
    """Several equations as one: all must hold, and it tells something if any of them does."""
    if not results:
        return None
    points = frozenset(p for r in results for p in r.points)
    return Measured(max(r.error for r in results), all(r.vacuous for r in results), points)


# ------------------------------------------------------------------------------------------------ the trunk


@_identity("embedding", "embeddings = W_E[tokens]")
def _embedding(e: Evidence, _: int | None) -> Measured | None:
    if not e.has(None, "embeddings"):
        return None
    return _equal(e.get("embeddings", None), e.call("embedding", None, e.ids))


@_identity("first_residual", "resid_pre.0 = embeddings (+ position embedding)")
def _first_residual(e: Evidence, _: int | None) -> Measured | None:
    terms = [t for path in e.anatomy.summands if (t := e.output(path)) is not None]
    if not terms or len(terms) != len(e.anatomy.summands) or not e.has(0, "resid_pre"):
        return None
    total = e.get("resid_pre", 0)
    return _equal(sum(terms[1:], terms[0]).expand_as(total), total)


@_identity("final_norm", "final_norm = norm(resid_post.last)")
def _final_norm(e: Evidence, _: int | None) -> Measured | None:
    last = e.anatomy.facts.n_layers - 1
    if not e.has(None, "final_norm") or not e.has(last, "resid_post"):
        return None
    return _equal(e.get("final_norm", None), e.call("final_norm", None, e.get("resid_post", last)))


@_identity("unembedding", "lm_head = W_U final_norm")
def _unembedding(e: Evidence, _: int | None) -> Measured | None:
    if not e.has(None, "final_norm", "lm_head"):
        return None
    return _equal(e.get("lm_head", None), e.call("lm_head", None, e.get("final_norm", None)))


@_identity("logits", "logits = cap(scale · lm_head)")
def _logits(e: Evidence, _: int | None) -> Measured | None:
    if not e.has(None, "lm_head", "logits"):
        return None
    return _equal(e.anatomy.shape_logits(e.get("lm_head", None)), e.get("logits", None))


# ------------------------------------------------------------------------------------------------ the residual


@_identity("chain", "resid_pre[l+1] = resid_post[l]")
def _chain(e: Evidence, layer: int | None) -> Measured | None:
    assert layer is not None
    last = e.anatomy.facts.n_layers - 1
    results = []
    if layer == 0 and (first := _first_residual(e, None)):
        results.append(Measured(first.error, first.vacuous, frozenset(["resid_pre"])))
    if layer > 0:
        results.append(_equal(e.get("resid_pre", layer), e.get("resid_post", layer - 1), ("resid_pre",)))
    if layer < last:
        results.append(_equal(e.get("resid_pre", layer + 1), e.get("resid_post", layer), ("resid_post",)))
    elif final := _final_norm(e, None):
        results.append(Measured(final.error, final.vacuous, frozenset(["resid_post"])))
    return _worst(results)


@_identity("mid_sum", "resid_mid = resid_pre + attn_out_post")
def _mid_sum(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "resid_mid", "attn_out_post"):
        return None
    return _sum(e.get("resid_mid", layer), (e.get("resid_pre", layer), e.get("attn_out_post", layer)))


@_identity("block_sum", "resid_post = resid_mid + mlp_out_post, or resid_pre + attn_out_post + mlp_out_post")
def _block_sum(e: Evidence, layer: int | None) -> Measured | None:
    names = ("resid_mid", "mlp_out_post")
    if not e.has(layer, "resid_mid"):
        names = ("resid_pre", "attn_out_post", "mlp_out_post")
    if not e.has(layer, *names):
        return None
    points = ("resid_post", "mlp_out_post", *(["attn_out_post"] if len(names) == 3 else []))
    return _sum(e.get("resid_post", layer), tuple(e.get(n, layer) for n in names), points)


# ------------------------------------------------------------------------------------------------ attention


@_identity("attn_input", "attn_in = norm(resid_pre)")
def _attn_input(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "attn_in"):
        return None
    residual = e.get("resid_pre", layer)
    normed = e.call("attn_norm", layer, residual) if "attn_norm" in e.part(layer).modules else residual
    return _equal(e.get("attn_in", layer), normed)


@_identity("projection", "query, key, value = W attn_in (+ b)")
def _projection(e: Evidence, layer: int | None) -> Measured | None:
    part, results = e.part(layer), []
    for name in ("query", "key", "value"):
        if not e.has(layer, name, "attn_in") or f"w_{name[0]}" not in part.modules:
            continue
        projected = e.call(f"w_{name[0]}", layer, e.get("attn_in", layer))
        channels = part.sites[name].view.channels
        wanted = projected if channels is None else channels.read(projected)
        results.append(_equal(e.get(name, layer), wanted, (name,)))
        before = f"{name[0]}_norm_in"
        if name != "value" and e.has(layer, before):
            results.append(_equal(e.get(before, layer), wanted, (before,)))
    return _worst(results)


@_identity("qk_norm", "q_norm_out = norm(q_norm_in), k_norm_out = norm(k_norm_in)")
def _qk_norm(e: Evidence, layer: int | None) -> Measured | None:
    results = []
    facts = e.anatomy.facts.at(layer)
    for short, heads in (("q", facts.n_heads), ("k", facts.n_kv_heads)):
        names = (f"{short}_norm_in", f"{short}_norm_out")
        if not e.has(layer, *names):
            continue
        before, after = (e.get(n, layer) for n in names)
        if e.part(layer).sites[names[0]].view.layout != "tokens":
            normed = e.call(f"{short}_norm", layer, before.unflatten(-1, (heads or 1, -1))).flatten(-2)
        else:
            normed = e.call(f"{short}_norm", layer, before)
        results.append(_equal(after, normed, names))
    return _worst(results)


@_identity("rotation", "query_rotated = R(position) query: equal at position 0, of equal length everywhere")
def _rotation(e: Evidence, layer: int | None) -> Measured | None:
    results = []
    facts = e.anatomy.facts.at(layer)
    for name, heads in (("query", facts.n_heads), ("key", facts.n_kv_heads)):
        source = f"{name[0]}_norm_out" if e.has(layer, f"{name[0]}_norm_out") else name
        if not e.has(layer, source, f"{name}_rotated"):
            continue
        before = e.get(source, layer).unflatten(-1, (heads or 1, -1)).float()
        after = e.get(f"{name}_rotated", layer).unflatten(-1, (heads or 1, -1)).float()
        start = _equal(after[:, 0], before[:, 0], (source,))
        length = _equal(after.norm(dim=-1), before.norm(dim=-1), (source,))
        results += [start, length]
    return _worst(results)


@_identity("scores", "attn_scores = scale · query_rotated · key_rotated (capped, masked)")
def _scores(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "attn_scores", "query_rotated", "key_rotated"):
        return None
    facts = e.anatomy.facts.at(layer)
    query = e.get("query_rotated", layer).unflatten(-1, (facts.n_heads or 1, -1)).transpose(1, 2).float()
    key = e.get("key_rotated", layer).unflatten(-1, (facts.n_kv_heads or 1, -1)).transpose(1, 2).float()
    product = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
    scores = e.get("attn_scores", layer).float()
    seen = scores > torch.finfo(e.get("attn_scores", layer).dtype).min / 2
    cap = e.part(layer).constants.get("score_cap")
    linear = scores if cap is None else cap * torch.atanh((scores / cap).clamp(-0.9999999, 0.9999999))
    x, y = product[seen], linear[seen]
    scale = (x @ y) / (x @ x).clamp_min(1e-30)
    rebuilt = product * scale if cap is None else cap * torch.tanh(product * scale / cap)
    future = torch.ones_like(seen[0, 0]).triu(1)
    if bool((seen & future).any()):
        return Measured(float("inf"))
    zero = torch.zeros_like(scores)
    return _equal(torch.where(seen, rebuilt, zero), torch.where(seen, scores, zero))


@_identity("softmax", "attn_probs = softmax(attn_scores)")
def _softmax(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "attn_scores", "attn_probs"):
        return None
    return _equal(e.get("attn_probs", layer), e.get("attn_scores", layer).float().softmax(-1))


@_identity("mixing", "z = attn_probs · value, per head")
def _mixing(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "attn_probs", "value", "z"):
        return None
    facts = e.anatomy.facts.at(layer)
    probs = e.get("attn_probs", layer)
    value = e.get("value", layer).unflatten(-1, (facts.n_kv_heads or 1, -1)).transpose(1, 2)
    value = value.repeat_interleave(probs.shape[1] // value.shape[1], 1)
    return _equal((probs.float() @ value.float()).transpose(1, 2).flatten(-2), e.get("z", layer))


@_identity("attn_output", "attn_out = W_O z (+ b)")
def _attn_output(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "z", "attn_out"):
        return None
    return _equal(e.get("attn_out", layer), e.call("w_o", layer, e.get("z", layer)))


@_identity("attn_contribution", "attn_out_post = scale · norm(attn_out)")
def _attn_contribution(e: Evidence, layer: int | None) -> Measured | None:
    return _contribution(e, layer, "attn")


def _contribution(e: Evidence, layer: int | None, sublayer: str) -> Measured | None:
    raw, post = f"{sublayer}_out", f"{sublayer}_out_post"
    if not e.has(layer, raw, post):
        return None
    value, part = e.get(raw, layer), e.part(layer)
    if f"{sublayer}_post_norm" in part.modules:
        value = e.call(f"{sublayer}_post_norm", layer, value)
    return _equal(e.get(post, layer), value * part.sites[post].view.scale)


# ------------------------------------------------------------------------------------------------ the MLP


@_identity("mlp_input", "mlp_in = norm(resid_mid), or norm(resid_pre) in a parallel block")
def _mlp_input(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "mlp_in"):
        return None
    parallel = not e.has(layer, "resid_mid")
    residual = e.get("resid_pre" if parallel else "resid_mid", layer)
    normed = e.call("mlp_norm", layer, residual) if "mlp_norm" in e.part(layer).modules else residual
    return _equal(e.get("mlp_in", layer), normed)


@_identity("branches", "mlp_pre = W_gate mlp_in, mlp_pre_linear = W_in mlp_in")
def _branches(e: Evidence, layer: int | None) -> Measured | None:
    part, results = e.part(layer), []
    for name, role in (("mlp_pre", "w_gate"), ("mlp_pre_linear", "w_up")):
        if not e.has(layer, name, "mlp_in") or role not in part.modules:
            continue
        projected = e.call(role, layer, e.get("mlp_in", layer))
        channels = part.sites[name].view.channels
        results.append(_equal(e.get(name, layer), projected if channels is None else channels.read(projected), (name,)))
    return _worst(results)


@_identity("activation", "mlp_act = act(mlp_pre) · mlp_pre_linear")
def _activation(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "mlp_pre", "mlp_act") or "activation" not in e.part(layer).modules:
        return None
    value = e.call("activation", layer, e.get("mlp_pre", layer))
    if e.has(layer, "mlp_pre_linear"):
        value = value * e.get("mlp_pre_linear", layer)
    return _equal(e.get("mlp_act", layer), value)


@_identity("mlp_output", "mlp_out = W_out mlp_act (+ b)")
def _mlp_output(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "mlp_act", "mlp_out"):
        return None
    return _equal(e.get("mlp_out", layer), e.call("w_down", layer, e.get("mlp_act", layer)))


@_identity("mlp_contribution", "mlp_out_post = scale · norm(mlp_out)")
def _mlp_contribution(e: Evidence, layer: int | None) -> Measured | None:
    return _contribution(e, layer, "mlp")


# ------------------------------------------------------------------------------------------------ experts


@_identity("routing", "expert_weights ∝ softmax(router_logits) at expert_indices, its largest entries")
def _routing(e: Evidence, layer: int | None) -> Measured | None:
    if not e.has(layer, "router_logits", "expert_weights", "expert_indices"):
        return None
    logits = e.get("router_logits", layer).float()
    indices, weights = e.get("expert_indices", layer), e.get("expert_weights", layer).float()
    largest = logits.topk(indices.shape[-1], -1).indices.sort(-1).values
    if not torch.equal(largest, indices.sort(-1).values):
        return Measured(float("inf"))
    kinds = [logits.softmax(-1), logits.sigmoid()]
    results = [_proportional(weights, kind.gather(-1, indices)) for kind in kinds]
    return min(results, key=lambda r: r.error)


def _proportional(weights: Tensor, base: Tensor) -> Measured:
    scale = weights.sum(-1, keepdim=True) / base.sum(-1, keepdim=True)
    return _equal(weights, base * scale)


@_identity("expert_sum", "mlp_out = Σ expert_weights · expert(mlp_in) over expert_indices")
def _expert_sum(e: Evidence, layer: int | None) -> Measured | None:
    names = ("mlp_in", "expert_indices", "expert_weights", "mlp_out")
    if not e.has(layer, *names) or "experts" not in e.part(layer).modules:
        return None
    tokens, indices, weights, out = (e.get(n, layer) for n in names)
    rebuilt = e.call("experts", layer, tokens.flatten(0, 1), indices.flatten(0, 1), weights.flatten(0, 1))
    return _equal(rebuilt.reshape(out.shape), out)
