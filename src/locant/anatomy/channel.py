"""Find a block's MLP or mixture-of-experts points, and the residual between the two sublayers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from locant.anatomy.attention import Found, contribution
from locant.anatomy.projection import channel_index
from locant.anatomy.sites import Channels, ModuleSite, OpSite, Site, View
from locant.anatomy.structure import PRODUCTS, Scope, hidden_input, input_site, is_linear, output_site, rows
from locant.anatomy.trace import Event, Trace, Value, same

_NEURONS = ("mlp_pre", "mlp_pre_linear", "mlp_act")
_INTEGERS = (torch.int64, torch.int32)
_ROUTER = ("router_logits", "expert_weights", "expert_indices")


class ChannelFound(Found):
    """What was found, and whether the MLP reads the block's input rather than the residual after attention."""

    __slots__ = ("parallel",)

    def __init__(self) -> None:
        super().__init__()
        self.parallel = False


@dataclass(frozen=True, slots=True)
class Body:
    """The channel mixer: one module, or several that the block calls one after the other."""

    first: Event
    last: Event
    inside: list[Event]

    @property
    def taken(self) -> Value:
        found = hidden_input(self.first)
        assert found is not None, "a channel mixer is chosen by having an input"
        return found[1]


def find_channel_mixer(scope: Scope, attention: Found) -> ChannelFound:
    """The points of the block's MLP, dense or sparse."""
    found = ChannelFound()
    body = _body(scope, attention.module)
    if body is None:
        reason = "no module of this block mixes channels alone"
        found.absent = dict.fromkeys(["resid_mid", "mlp_in", "mlp_out", "mlp_out_post", *_NEURONS, *_ROUTER], reason)
        found.facts = {"channel": None}
        return found
    found.sites["mlp_in"] = input_site(body.first)
    _middle(scope, body, found)
    experts = next((e for e in body.inside if not e.is_op and _choice(e) is not None), None)
    if experts is not None:
        _sparse(scope, body, experts, found)
    else:
        _dense(scope, body, found)
    if norm := scope.norm_giving(scope.run.output()):
        found.modules["block_norm"] = norm.name
    return found


def _body(scope: Scope, attention: Event | None) -> Body | None:
    heavy = [e for e in scope.children if _is_heavy(e) and not _holds(e, attention)]
    after = [e for e in heavy if attention is None or e.index > attention.index]
    if len(after) > 1 and all(len(_linears(scope, e)) == 1 for e in after):
        first, last = after[0], after[-1]
        return Body(first, last, scope.trace.events[first.index : last.end])
    return Body(heavy[-1], heavy[-1], scope.trace.within(heavy[-1])) if heavy else None


def _is_heavy(event: Event) -> bool:
    matrices = event.module is not None and any(p.dim() >= 2 for p in event.module.parameters())
    return matrices and event.output() is not None and hidden_input(event) is not None


def _holds(event: Event, other: Event | None) -> bool:
    return other is not None and event.index <= other.index < event.end


def _linears(scope: Scope, event: Event) -> list[Event]:
    return [e for e in scope.trace.events[event.index : event.end] if is_linear(e)]


def _middle(scope: Scope, body: Body, found: ChannelFound) -> None:
    """The residual after attention: what the norm before the MLP reads, or the MLP itself where there is none."""
    norm = scope.norm_giving(body.taken)
    source = body.first
    if norm is not None:
        found.modules["mlp_norm"] = norm.name
        source = norm
    read = hidden_input(source)
    if read is not None and same(read[1], scope.residual[1]):
        found.parallel = True
        found.absent["resid_mid"] = (
            "attention and MLP of this block both read resid_pre, so no residual lies between them"
        )
    else:
        found.sites["resid_mid"] = input_site(source)


def _dense(scope: Scope, body: Body, found: ChannelFound) -> None:
    found.absent |= dict.fromkeys(_ROUTER, "this block has a dense MLP, no router")
    linears = [e for e in body.inside if is_linear(e)]
    if not linears:
        found.absent |= dict.fromkeys([*_NEURONS, "mlp_out", "mlp_out_post"], "no linear map inside this block's MLP")
        found.facts = {"channel": "other"}
        return
    down = linears[-1]
    found.modules["w_down"] = down.name
    found.sites["mlp_act"] = input_site(down)
    found.sites["mlp_out"] = output_site(down)
    found.sites["mlp_out_post"] = contribution(scope, down, found, "mlp_post_norm")
    activated = hidden_input(down)[1]  # type: ignore[index]
    found.facts["d_mlp"] = activated.shape[-1]
    _branches(scope, body, linears[:-1], activated, found)


def _branches(scope: Scope, body: Body, linears: list[Event], activated: Value, found: ChannelFound) -> None:
    """The pre-activation neurons, and the ungated branch where the activation is multiplied by one."""
    product = activated.producer
    gate, linear = activated, None
    if product is not None and product.name in PRODUCTS and len(product.inputs) == 2:
        operands = [v for _, v in product.inputs]
        straight = [v for v in operands if _source(v, linears, scope) is not None]
        if len(straight) == 1:
            linear = straight[0]
            gate = next(v for v in operands if v is not linear)
    found.facts["channel"] = "gated" if linear is not None else "plain"
    if linear is None:
        found.absent["mlp_pre_linear"] = "the MLP of this block is not gated, so it has one branch"
    else:
        found.sites["mlp_pre_linear"], found.modules["w_up"] = _branch_site(linear, linears, scope)
    act = next((e for e in scope.events if e.module is not None and e.output() is gate and not is_linear(e)), None)
    back = scope.trace.ancestors(gate, body.first.index)
    before = next((v for v in back if v is not gate and _source(v, linears, scope) is not None), None)
    if before is None:
        found.absent["mlp_pre"] = "no linear map leads straight into this MLP's activation"
        return
    found.sites["mlp_pre"], found.modules["w_gate"] = _branch_site(before, linears, scope)
    if act is not None:
        found.modules["activation"] = act.name


def _source(value: Value, linears: list[Event], scope: Scope) -> tuple[Event, list[int]] | None:
    """The linear map whose output channels `value` is a copy of."""
    n_pos = scope.residual[1].shape[1]
    for event in linears:
        output = event.output()
        if output is not None and value.shape[-1] <= output.shape[-1]:
            index = channel_index(value, output, n_pos)
            if index is not None:
                return event, index.flatten().tolist()
    return None


def _branch_site(value: Value, linears: list[Event], scope: Scope) -> tuple[ModuleSite, str]:
    source = _source(value, linears, scope)
    assert source is not None, "a branch is chosen by having a source"
    event, index = source
    output = event.output()
    whole = output is not None and len(index) == output.shape[-1]
    view = View() if output is None else rows(output)
    return output_site(event, replace(view, channels=None if whole else Channels.of(index))), event.name


def _choice(event: Event) -> tuple[tuple[object, Value], tuple[object, Value]] | None:
    whole = [(s, v) for s, v in event.inputs if v.tensor.dtype in _INTEGERS and v.tensor.dim() == 2]
    for chosen in whole:
        for weight in event.inputs:
            if weight[1].tensor.is_floating_point() and weight[1].shape == chosen[1].shape:
                return chosen, weight
    return None


def _sparse(scope: Scope, body: Body, experts: Event, found: ChannelFound) -> None:
    reason = "the neurons of a mixture of experts belong to its experts, one set each"
    found.absent |= dict.fromkeys(_NEURONS, reason)
    found.sites["mlp_out"] = output_site(body.last)
    found.sites["mlp_out_post"] = contribution(scope, body.last, found, "mlp_post_norm")
    choice = _choice(experts)
    assert choice is not None, "an experts call is chosen by taking a choice"
    chosen, weight = choice
    found.modules["experts"] = experts.name
    found.facts |= {"channel": "moe", "experts_per_token": chosen[1].shape[-1]}

    def argument(slot: object, value: Value) -> ModuleSite:
        return ModuleSite(experts.name, "input", slot, experts.call, View("flat"), value.overwritten)  # type: ignore[arg-type]

    found.sites["expert_indices"] = argument(*chosen)
    found.sites["expert_weights"] = argument(*weight)
    inside = [e for e in body.inside if not e.is_op and e.index < experts.index]
    router = next((e for e in reversed(inside) if any(same(v, chosen[1]) for _, v in e.outputs)), None)
    _shared(scope, body, experts, router, found)
    logits = _logits(scope.trace, router, inside)
    if logits is None:
        found.absent["router_logits"] = "no module of this block returns one number per expert"
        return
    found.sites["router_logits"], found.facts["n_experts"] = logits
    found.modules["router"] = found.sites["router_logits"].path


def _shared(scope: Scope, body: Body, experts: Event, router: Event | None, found: ChannelFound) -> None:
    """Experts that every token goes through, beside the chosen ones, and their gate where there is one."""
    beside = [
        e
        for e in body.inside
        if e.depth == body.first.depth + 1 and e is not experts and e is not router and _is_heavy(e)
    ]
    for event in beside:
        linears, given = _linears(scope, event), event.output()
        if len(linears) > 1:
            found.modules["shared"] = event.name
        elif linears and given is not None and given.shape[-1] == 1:
            found.modules["shared_gate"] = event.name


def _logits(trace: Trace, router: Event | None, inside: list[Event]) -> tuple[Site, int] | None:
    """The router's output of one number per expert: its own, or its linear map's."""
    candidates = [router] if router is not None else []
    candidates += [e for e in inside if is_linear(e)]
    for event in candidates:
        for slot, value in event.outputs:
            if value.tensor.is_floating_point() and value.shape[-1] == _n_experts(event):
                view = View("flat" if value.tensor.dim() == 2 else "tokens")
                made = value.producer
                if made is not None and event.index < made.index < event.end:
                    # the routing reads it before the module returns it
                    nth = trace.nth(made, event)
                    site: Site = OpSite(event.name, made.name, nth, None, event.call, view, value.overwritten)
                else:
                    site = ModuleSite(event.name, "output", slot, event.call, view, value.overwritten)
                return site, value.shape[-1]
    return None


def _n_experts(event: Event) -> int | None:
    weight = getattr(event.module, "weight", None)
    return None if weight is None else int(weight.shape[0])
