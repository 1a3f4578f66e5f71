"""Find a block's MLP or mixture-of-experts points, and the residual between the two sublayers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from locant.anatomy.attention import Found
from locant.anatomy.formula import Named
from locant.anatomy.neurons import find_neurons
from locant.anatomy.residual import Flow, scaled
from locant.anatomy.sites import ModuleSite, OpSite, Site, View
from locant.anatomy.structure import (
    ADDITIONS,
    PRODUCTS,
    Scope,
    behind_norm,
    hidden_input,
    input_site,
    is_heavy,
    is_linear,
    output_site,
    own_weight,
)
from locant.anatomy.trace import Event, Trace, Value, same

_NEURONS = ("mlp_pre", "mlp_pre_linear", "mlp_act")
_INTEGERS = (torch.int64, torch.int32)
_ROUTER = ("router_logits", "expert_weights", "expert_indices")


class ChannelFound(Found):
    """What was found, and the residual after attention; `parallel` where the MLP reads the block's input."""

    __slots__ = ("experts", "middle", "parallel", "shared")

    def __init__(self) -> None:
        super().__init__()
        self.parallel = False
        self.middle: Value | None = None
        self.experts: Event | None = None
        self.shared: Event | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """The channel mixer: one module, or several that the block calls one after the other."""

    first: Event
    last: Event
    inside: list[Event]
    modules: list[Event]
    linears: list[Event]


def find_channel_mixer(scope: Scope, flow: Flow, attention: Found) -> ChannelFound:
    """The points of the block's MLP, dense or sparse."""
    found = ChannelFound()
    several = attention.facts.get("mixer") == "several"
    body = None if several else _body(scope, flow, attention)
    if body is None:
        reason = "no module of this block mixes channels alone"
        if several:
            reason = "this block has several attention sublayers, and its MLPs belong to none of them alone"
        found.absent = dict.fromkeys(["resid_mid", "mlp_in", "mlp_out", "mlp_out_post", *_NEURONS, *_ROUTER], reason)
        found.facts = {"channel": None}
        return found
    found.module, found.parts = body.first, body.modules
    entered = behind_norm(scope, body.first, next(iter(body.linears), body.first))
    found.sites["mlp_in"] = input_site(entered)
    _middle(flow, entered, found)
    experts = next((e for e in body.inside if not e.is_op and _choice(e) is not None), None)
    if experts is not None:
        _sparse(scope, body, experts, found)
    else:
        _dense(scope, body, found)
    return found


def _body(scope: Scope, flow: Flow, attention: Found) -> Body | None:
    mixer = attention.module
    heavy = [e for e in scope.children if is_heavy(e) and e is not mixer and not _holds(e, mixer)]
    if attention.facts.get("mixer") == "other":
        written = flow.addition_of(mixer) if mixer is not None else None
        heavy = [e for e in heavy if flow.addition_of(e) is not written] if written is not None else []
    norms = [norm for e in heavy if (taken := hidden_input(e)) and (norm := flow.norm_before(taken[1]))]
    heavy = [e for e in heavy if e not in norms]
    if flow.steps is not None and (group := _writers(flow, heavy, mixer)):
        step = flow.addition_of(group[0])
        inside = scope.trace.events[group[0].index : group[-1].end]
        return Body(
            group[0], group[-1], inside, group, [e for e in inside if is_linear(e) and flow.addition_of(e) is step]
        )
    after = [e for e in heavy if mixer is None or e.index > mixer.index]
    if len(after) > 1 and all(len(_linears(scope, e)) == 1 for e in after):
        first, last = after[0], after[-1]
        return Body(
            first,
            last,
            scope.trace.events[first.index : last.end],
            after,
            [x for e in after for x in _linears(scope, e)],
        )
    if not heavy:
        return None
    return Body(heavy[-1], heavy[-1], scope.trace.within(heavy[-1]), heavy[-1:], _linears(scope, heavy[-1]))


def _writers(flow: Flow, heavy: Sequence[Event], mixer: Event | None) -> list[Event]:
    """The modules behind the first addition after attention's own, or behind that one in a parallel block."""
    own = flow.addition_of(mixer) if mixer is not None else None
    at = flow.additions.index(own) if own is not None else -1
    later = [e for e in heavy if mixer is None or e.index > mixer.index]  # what runs before attention may be added late
    for candidates in (later, heavy):
        for step in [*flow.additions[at + 1 :], *flow.additions[: at + 1]]:
            group = [e for e in candidates if flow.addition_of(e) is step]
            while len(group) > 1 and _comes_after(flow.scope, group[-1], group[-2]):
                group.pop()
            if group:
                return group
    return []


def _comes_after(scope: Scope, event: Event, mlp: Event) -> bool:
    """`event` only takes on what a whole MLP puts out."""
    taken = hidden_input(event)
    return taken is not None and same(taken[1], mlp.output()) and len(_linears(scope, mlp)) > 1


def _holds(event: Event, other: Event | None) -> bool:
    return other is not None and event.index <= other.index < event.end


def _linears(scope: Scope, event: Event) -> list[Event]:
    return [e for e in scope.trace.events[event.index : event.end] if is_linear(e)]


def _middle(flow: Flow, entered: Event, found: ChannelFound) -> None:
    """The residual after attention: what the norm before the MLP reads, or the MLP itself where there is none."""
    taken = hidden_input(entered)
    norm = flow.norm_before(taken[1]) if taken is not None else None
    source = entered
    if norm is not None:
        found.modules["mlp_norm"] = norm.name
        source = norm
    read = hidden_input(source)
    if read is not None and same(read[1], flow.scope.residual[1]):
        found.parallel = True
        found.absent["resid_mid"] = (
            "attention and MLP of this block both read resid_pre, so no residual lies between them"
        )
    else:
        found.sites["resid_mid"] = input_site(source)
        found.middle = read[1] if read is not None else None


def _routed(body: Body, found: ChannelFound) -> bool:
    """Some tensor says which experts take a token, but no module is handed indices and weights together."""
    if not any(e.is_op and e.name == "topk" for e in body.inside):
        return False
    reason = "this block chooses experts, and hands them no indices and weights [tokens, chosen] that could be read"
    found.absent |= dict.fromkeys([*_ROUTER, *_NEURONS], reason)
    found.facts = {"channel": "moe"}
    found.raw = body.last
    return True


def _dense(scope: Scope, body: Body, found: ChannelFound) -> None:
    if _routed(body, found):
        return
    found.absent |= dict.fromkeys(_ROUTER, "this block has a dense MLP, no router")
    linears = body.linears
    if not linears:
        found.absent |= dict.fromkeys([*_NEURONS, "mlp_out", "mlp_out_post"], "no linear map inside this block's MLP")
        found.facts = {"channel": "other"}
        return
    if _gated_after(scope, body):
        reason = "what this MLP adds is a product of two linear maps, so no neurons are mapped straight to it"
        found.absent |= dict.fromkeys(_NEURONS, reason)
        found.facts = {"channel": "other"}
        found.sites["mlp_out"] = output_site(body.last)
        found.raw = body.last
        return
    down = linears[-1]
    found.modules["w_down"] = down.name
    found.sites["mlp_act"] = input_site(down)
    found.sites["mlp_out"] = output_site(down)
    found.raw = down
    activated = hidden_input(down)[1]  # type: ignore[index]
    if (norm := scope.norm_giving(activated)) is not None and norm.index > body.first.index:
        found.modules["act_norm"] = norm.name
        activated = hidden_input(norm)[1]  # type: ignore[index]
    found.facts["d_mlp"] = activated.shape[-1]
    find_neurons(scope, body.first, linears[:-1], activated, found)


def _gated_after(scope: Scope, body: Body) -> bool:
    """The MLP returns the product of what two of its linear maps give."""
    given = body.last.output()
    made = given.producer if given is not None else None
    if made is None or made.name not in PRODUCTS or len(made.inputs) != 2:
        return False
    outputs = [id(e.output()) for e in body.linears]
    return all(any(id(v) in outputs for v in scope.trace.ancestors(x, body.first.index)) for _, x in made.inputs)


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
    found.raw = body.last
    choice = _choice(experts)
    assert choice is not None, "an experts call is chosen by taking a choice"
    chosen, weight = choice
    found.modules["experts"] = experts.name
    found.experts = experts
    found.facts |= {"channel": "moe", "experts_per_token": chosen[1].shape[-1]}

    def argument(slot: object, value: Value) -> ModuleSite:
        return ModuleSite(experts.name, "input", slot, experts.call, View("flat"), value.overwritten)  # type: ignore[arg-type]

    found.sites["expert_indices"] = argument(*chosen)
    found.sites["expert_weights"] = argument(*weight)
    inside = [e for e in body.inside if not e.is_op and e.index < experts.index]
    router = next((e for e in reversed(inside) if any(same(v, chosen[1]) for _, v in e.outputs)), None)
    _shared(scope, body, experts, router, found)
    _norms_of_experts(scope, body, experts, found)
    if router is not None:
        found.modules["routing"] = router.name
        read, own = hidden_input(router), hidden_input(body.first)
        if read is not None and same(read[1], found.middle) and own is not None and not same(read[1], own[1]):
            found.formulas["router_in"] = Named("resid_mid")
    reach = {id(v) for v in scope.trace.ancestors(chosen[1], scope.run.index)}
    made = [e for e in inside if is_linear(e) and id(e.output()) in reach]
    logits = _logits(scope.trace, router, made)
    if logits is None:
        found.absent["router_logits"] = "no module of this block returns one number per expert"
        return
    found.sites["router_logits"], found.facts["n_experts"] = logits
    found.modules["router"] = found.sites["router_logits"].path


def _shared(scope: Scope, body: Body, experts: Event, router: Event | None, found: ChannelFound) -> None:
    """Experts that every token goes through, beside the chosen ones, and their gate where there is one."""
    depth = body.first.depth + 1
    inside = [e for e in body.inside if e.depth == depth and e is not experts and e is not router]
    for event in [*(e for e in body.modules if not _holds(e, experts) and e is not router), *inside]:
        linears, given = _linears(scope, event), event.output()
        if len(linears) > 1:
            found.modules["shared"], found.shared = event.name, event
        elif linears and given is not None and given.shape[-1] == 1:
            found.modules["shared_gate"] = event.name


def _norms_of_experts(scope: Scope, body: Body, experts: Event, found: ChannelFound) -> None:
    """Norms that only the chosen experts, or only the shared ones, have before and after them."""
    taken, own = hidden_input(experts), found.modules.get("mlp_norm")
    before = scope.norm_giving(taken[1]) if taken is not None else None
    read = hidden_input(before) if before is not None else None
    if before is not None and read is not None and before.name != own and same(read[1], found.middle):
        found.modules["experts_norm"] = before.name
    for role, event in (("experts", experts), ("shared", found.shared)):
        after = scope.norm_reading(event.output()) if event is not None and len(body.modules) > 1 else None
        if after is not None:
            found.modules[f"{role}_post_norm"] = after.name


def mixture(out: Value | None, found: Found) -> dict[str, float]:
    """What the sum of the chosen experts, and that of the shared ones, is multiplied by before both are added."""
    if out is None or not isinstance(found, ChannelFound) or found.experts is None:
        return {}
    scales: dict[str, float] = {}
    terms = [(out, 1.0)]
    for value, factor in terms:
        bare, own = scaled(value)
        made = bare.producer
        if same(bare, found.experts.output()):
            scales["experts_scale"] = factor * own
        elif found.shared is not None and same(bare, found.shared.output()):
            scales["shared_scale"] = factor * own
        elif made is not None and made.name in ADDITIONS and len(made.inputs) == 2:
            terms.extend((v, factor * own) for _, v in made.inputs)
    return scales


def _logits(trace: Trace, router: Event | None, linears: list[Event]) -> tuple[Site, int] | None:
    """The router's output of one number per expert: its own, or its linear map's."""
    candidates = [router] if router is not None else []
    for event in [*candidates, *reversed(linears)]:
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
    weight = own_weight(event.module)
    return None if weight is None else int(weight.shape[0])
