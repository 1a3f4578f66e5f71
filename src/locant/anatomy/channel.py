"""Find a block's MLP or mixture-of-experts points, and the residual between the two sublayers."""

from __future__ import annotations

import torch

from locant.anatomy.attention import Found, contribution
from locant.anatomy.projection import channel_index
from locant.anatomy.sites import Channels, ModuleSite, OpSite, Site, View
from locant.anatomy.structure import PRODUCTS, Scope, hidden_input, input_site, is_linear, output_site
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


def find_channel_mixer(scope: Scope, attention: Found) -> ChannelFound:
    """The points of the block's MLP, dense or sparse."""
    found = ChannelFound()
    mixer = _mixer(scope, attention.module)
    if mixer is None:
        reason = "no module of this block mixes channels alone"
        found.absent = dict.fromkeys(["resid_mid", "mlp_in", "mlp_out", "mlp_out_post", *_NEURONS, *_ROUTER], reason)
        found.facts = {"channel": None}
        return found
    found.module = mixer
    found.sites["mlp_in"] = input_site(mixer)
    _middle(scope, mixer, found)
    experts = _experts(scope, mixer)
    if experts is not None:
        _sparse(scope, mixer, experts, found)
    else:
        _dense(scope, mixer, found)
    return found


def _mixer(scope: Scope, attention: Event | None) -> Event | None:
    heavy = [
        e
        for e in scope.children
        if e is not attention
        and e.output() is not None
        and hidden_input(e) is not None
        and e.module is not None
        and any(p.dim() >= 2 for p in e.module.parameters())
        and not (attention is not None and e.index < attention.index < e.end)
    ]
    return heavy[-1] if heavy else None


def _middle(scope: Scope, mixer: Event, found: ChannelFound) -> None:
    """The residual after attention: what the norm before the MLP reads, or the MLP itself where there is none."""
    taken = hidden_input(mixer)
    assert taken is not None, "a channel mixer is chosen by having an input"
    norm = scope.norm_giving(taken[1])
    source = mixer
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


def _dense(scope: Scope, mixer: Event, found: ChannelFound) -> None:
    found.absent |= dict.fromkeys(_ROUTER, "this block has a dense MLP, no router")
    inside = [e for e in scope.events if mixer.index < e.index < mixer.end]
    linears = [e for e in inside if is_linear(e)]
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
    _branches(scope, mixer, linears[:-1], activated, found)


def _branches(scope: Scope, mixer: Event, linears: list[Event], activated: Value, found: ChannelFound) -> None:
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
    back = scope.trace.ancestors(gate, mixer.index)
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
    return output_site(event, View(channels=None if whole else Channels.of([index]))), event.name


def _experts(scope: Scope, mixer: Event) -> Event | None:
    """The call that takes hidden states, chosen experts and their weights."""
    inside = [e for e in scope.events if not e.is_op and mixer.index < e.index < mixer.end]
    return next((e for e in inside if _choice(e) is not None), None)


def _choice(event: Event) -> tuple[tuple[object, Value], tuple[object, Value]] | None:
    whole = [(s, v) for s, v in event.inputs if v.tensor.dtype in _INTEGERS and v.tensor.dim() == 2]
    for chosen in whole:
        for weight in event.inputs:
            if weight[1].tensor.is_floating_point() and weight[1].shape == chosen[1].shape:
                return chosen, weight
    return None


def _sparse(scope: Scope, mixer: Event, experts: Event, found: ChannelFound) -> None:
    reason = "the neurons of a mixture of experts belong to its experts, one set each"
    found.absent |= dict.fromkeys(_NEURONS, reason)
    found.sites["mlp_out"] = output_site(mixer)
    found.sites["mlp_out_post"] = contribution(scope, mixer, found, "mlp_post_norm")
    choice = _choice(experts)
    assert choice is not None, "an experts call is chosen by taking a choice"
    chosen, weight = choice
    found.modules["experts"] = experts.name
    found.facts |= {"channel": "moe", "experts_per_token": chosen[1].shape[-1]}

    def argument(slot: object, value: Value) -> ModuleSite:
        return ModuleSite(experts.name, "input", slot, experts.call, View("flat"), value.overwritten)  # type: ignore[arg-type]

    found.sites["expert_indices"] = argument(*chosen)
    found.sites["expert_weights"] = argument(*weight)
    inside = [e for e in scope.events if not e.is_op and mixer.index < e.index < experts.index]
    router = next((e for e in reversed(inside) if any(same(v, chosen[1]) for _, v in e.outputs)), None)
    logits = _logits(scope.trace, router, inside)
    if logits is None:
        found.absent["router_logits"] = "no module of this block returns one number per expert"
        return
    found.sites["router_logits"], found.facts["n_experts"] = logits
    found.modules["router"] = found.sites["router_logits"].path


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
