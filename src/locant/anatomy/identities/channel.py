"""Equations of a channel mixer: a dense MLP, or a router and its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from locant.anatomy.evidence import Equation, Evidence
from locant.anatomy.identities.residual import contribution
from locant.anatomy.identities.table import identity
from locant.anatomy.sites import wide
from locant.anatomy.structure import CALL_ERRORS


@identity(
    "mlp_input",
    "mlp_in = norm(resid_mid), or norm(resid_pre) in a parallel block, of several streams norm(mlp_stream_collapse)",
)
def _mlp_input(e: Evidence) -> list[Equation]:
    if not e.has("mlp_in"):
        return []
    name = "resid_mid" if e.has("resid_mid") else "resid_pre"
    if e.facts.n_streams > 1 and e.part.lane is None:
        name = "mlp_stream_collapse"
        if not e.has(name):
            return []
    residual = e.get(name)
    normed = e.call("mlp_norm", residual) if e.plays("mlp_norm") else residual
    return [e.equal(e.get("mlp_in"), normed, "mlp_in", name)]


@identity("branches", "mlp_pre = W_gate mlp_in, mlp_pre_linear = W_in mlp_in")
def _branches(e: Evidence) -> list[Equation]:
    found = []
    for name, role in (("mlp_pre", "w_gate"), ("mlp_pre_linear", "w_up")):
        if not e.has(name, "mlp_in") or not e.plays(role):
            continue
        projected, channels = e.call(role, e.get("mlp_in")), e.channels(name)
        wanted = projected if channels is None else channels.read(projected)
        found.append(e.equal(e.get(name), wanted, name, "mlp_in"))
    return found


@identity("activation", "mlp_act = act(mlp_pre) · mlp_pre_linear")
def _activation(e: Evidence) -> list[Equation]:
    if not e.has("mlp_pre", "mlp_act"):
        return []
    names = ["mlp_act", "mlp_pre", *(n for n in ("mlp_pre_linear",) if e.has(n))]
    if "mlp_act" in e.part.formulas:
        value = e.computed("mlp_act")
    elif e.plays("activation"):
        value = e.call("activation", e.get("mlp_pre"))
        value = value * e.get("mlp_pre_linear") if e.has("mlp_pre_linear") else value
    else:
        return [e.fails("mlp_pre", *names[2:])]
    if e.plays("act_norm"):
        value = e.call("act_norm", value)
    return [e.equal(e.get("mlp_act"), value, *names)]


@identity("mlp_output", "mlp_out = W_out mlp_act (+ b)", doubt_from=("mlp_out",))
def _mlp_output(e: Evidence) -> list[Equation]:
    if not e.has("mlp_act", "mlp_out"):
        return []
    return [e.equal(e.get("mlp_out"), e.call("w_down", e.get("mlp_act")), "mlp_out", "mlp_act")]


@identity("mlp_contribution", "mlp_out_post = scale · norm(mlp_out)", doubt_from=("mlp_out_post",))
def _mlp_contribution(e: Evidence) -> list[Equation]:
    return contribution(e, "mlp")


@identity(
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
    whole = [x.reshape(logits.shape) for x in routed if x.numel() == logits.numel()]
    made = [e.equal(kind, x, names[0], "mlp_in") for x in whole for kind in (logits, logits.softmax(-1))]
    kinds = [kind.gather(-1, indices) for kind in (logits.softmax(-1), logits.sigmoid())]
    scaled = [kind * (weights.sum(-1, keepdim=True) / kind.sum(-1, keepdim=True)) for kind in kinds]
    if not torch.allclose(logits.sum(-1), torch.ones_like(logits[..., 0]), atol=1e-3):  # else these are shares already
        scaled += [x.reshape(weights.shape) for x in routed if x.numel() == weights.numel()]
    chosen = [e.equal(weights, wanted, *names) for wanted in scaled]
    return [min(found, key=lambda q: q.error) for found in (made, chosen) if found]


def _routed(e: Evidence) -> list[Tensor]:
    """What the router, and the linear map in it, give for what the router reads, called by hand."""
    if not e.has("mlp_in"):
        return []
    given = e.computed("router_in") if "router_in" in e.part.formulas else e.get("mlp_in")
    found = list[Tensor]()
    for role in (r for r in ("router", "routing") if e.plays(r)):
        try:
            result = e.call(role, given.flatten(0, 1))
        except CALL_ERRORS:
            continue  # it is handed more than the hidden states
        parts = result if isinstance(result, (tuple, list)) else [result]
        found += [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]
    return found


@identity(
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
    taken = e.call("experts_norm", e.get("resid_mid")) if e.plays("experts_norm") else e.get("mlp_in")
    choice = (e.get(name).flatten(0, 1) for name in names[2:])
    rebuilt = e.call("experts", taken.flatten(0, 1), *choice).reshape(out.shape)
    if e.plays("experts_post_norm"):
        rebuilt = e.call("experts_post_norm", rebuilt)
    rebuilt = rebuilt * constants.get("experts_scale", 1.0)
    if e.plays("shared"):
        shared = e.call("shared", e.get("mlp_in"))
        if e.plays("shared_gate"):
            shared = shared * e.call("shared_gate", e.get("mlp_in")).sigmoid()
        if e.plays("shared_post_norm"):
            shared = e.call("shared_post_norm", shared)
        rebuilt = rebuilt + shared * constants.get("shared_scale", 1.0)
    return [e.equal(rebuilt, out, *names)]
