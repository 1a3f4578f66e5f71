"""Find the neurons of a dense MLP: what its activation reads, and which of two branches is the ungated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from locant.anatomy.attention import Found
from locant.anatomy.formula import Formula, Named, formula_of
from locant.anatomy.projection import channel_index
from locant.anatomy.sites import Channels, ModuleSite, View
from locant.anatomy.structure import PRODUCTS, Scope, hidden_input, output_site, rows
from locant.anatomy.trace import Event, Trace, Value, same


def find_neurons(scope: Scope, first: Event, linears: list[Event], activated: Value, found: Found) -> None:
    """The pre-activation neurons, and the ungated branch where the activation is multiplied by one."""
    leaves: list[tuple[Event, list[int], Value]] = []

    def leaf(value: Value) -> str | None:
        source = _source(value, linears, scope)
        if source is None:
            return None
        at = next((i for i, (event, index, _) in enumerate(leaves) if (event, index) == source), len(leaves))
        if at == len(leaves):
            leaves.append((*source, value))
        return roles[at] if at < len(roles) else str(at)

    roles: list[str] = []
    formula = formula_of(activated, scope.trace, first.index, leaf)
    if formula is None:
        leaves.clear()
    roles = _roles(formula, [value for _, _, value in leaves], scope.trace)
    if not roles:
        _branches_by_module(scope, first, linears, activated, found)
        return
    if (computed := formula_of(activated, scope.trace, first.index, leaf)) is not None:
        found.formulas["mlp_act"] = computed
    found.facts["channel"] = "gated" if len(roles) > 1 else "plain"
    for point, (_, _, value) in zip(roles, leaves, strict=True):
        found.sites[point], found.modules["w_gate" if point == "mlp_pre" else "w_up"] = _branch_site(
            value, linears, scope
        )
    if len(roles) == 1:
        found.absent["mlp_pre_linear"] = _ONE_BRANCH


def _roles(formula: Formula | Named | None, leaves: Sequence[Value], trace: Trace) -> list[str]:
    """Which branch is which: the result is linear in the ungated one, and in no other; none where that is unclear."""
    if formula is None or not 1 <= len(leaves) <= 2:
        return []
    if len(leaves) == 1:
        return ["mlp_pre"]
    data = [v.data.reshape(-1, v.shape[-1]).double() / v.data.abs().max().double() for v in leaves]
    straight = [_is_affine(formula, data, at, trace) for at in range(2)]
    return ["mlp_pre_linear" if line else "mlp_pre" for line in straight] if sum(straight) == 1 else []


def _is_affine(formula: Formula | Named, data: Sequence[Tensor], at: int, trace: Trace) -> bool:
    def result(factor: float) -> Tensor:
        given = [x * factor if i == at else x for i, x in enumerate(data)]
        if isinstance(formula, Named):
            return given[at]
        return formula.of(lambda named: trace.weight(named.name) if named.weight else given[int(named.name)])

    zero, one, two, back = (result(x) for x in (0.0, 1.0, 2.0, -1.0))
    size = 1e-3 * float((one - zero).abs().max())
    return bool(((two + zero - 2 * one).abs().max() < size) & ((one + back - 2 * zero).abs().max() < size))


_ONE_BRANCH = "the MLP of this block is not gated, so it has one branch"


def _branches_by_module(scope: Scope, first: Event, linears: list[Event], activated: Value, found: Found) -> None:
    """The branches where an operation of the activation is not seen, and the activation is a module."""
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
        found.absent["mlp_pre_linear"] = _ONE_BRANCH
    else:
        found.sites["mlp_pre_linear"], found.modules["w_up"] = _branch_site(linear, linears, scope)
    back = scope.trace.ancestors(gate, first.index)
    before = next((v for v in back if v is not gate and _source(v, linears, scope) is not None), None)
    act = next((e for e in scope.calls if same(e.output(), gate) and _takes(e, before)), None)
    if before is None or act is None:
        found.absent["mlp_pre"] = "no linear map leads straight into this MLP's activation"
        return
    found.sites["mlp_pre"], found.modules["w_gate"] = _branch_site(before, linears, scope)
    found.modules["activation"] = act.name


def _takes(event: Event, value: Value | None) -> bool:
    read = hidden_input(event)
    return read is not None and same(read[1], value)


def _source(value: Value, linears: list[Event], scope: Scope) -> tuple[Event, list[int]] | None:
    """The linear map whose output channels `value` is a copy of."""
    n_pos = scope.n_pos
    for event in linears:
        output = event.output()
        if output is not None and value.shape[-1:] and value.shape[-1] <= output.shape[-1]:
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
