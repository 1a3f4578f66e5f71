"""Recognise the parts of a block by what they do: norms, linear maps, and the children of one block execution."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from locant.anatomy.sites import ModuleSite, OpSite, Slot, View
from locant.anatomy.trace import Event, Trace, Value, same, slots

ADDITIONS = frozenset(["add", "__add__", "__radd__", "__iadd__", "add_"])
PRODUCTS = frozenset(["mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply"])
QUOTIENTS = frozenset(["div", "__truediv__", "__itruediv__", "div_", "divide"])
DIFFERENCES = frozenset(["sub", "__sub__", "sub_", "subtract"])
GATES = frozenset(["sigmoid", "softplus", "silu", "tanh", "relu"])
CONTRACTIONS = frozenset(["matmul", "__matmul__", "bmm", "baddbmm", "einsum"])


CALL_ERRORS = (TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError)
"""What a module raises that is called by hand in a way it was not made for."""


class Scope:
    """One block execution of a trace, and what its events are.

    Attributes:
        stack: how the residual is laid out where it is a stack of several streams.
        lane: the vectors between which the sublayers read and write, where these are not the block's own input and
            output.
    """

    def __init__(
        self, trace: Trace, run: Event, stack: View | None = None, lane: tuple[Value, Value] | None = None
    ) -> None:
        self.trace = trace
        self.run = run
        self.stack = stack
        self.lane = lane
        self.events = trace.within(run)
        self._norms: dict[int, bool] = {}

    @cached_property
    def residual(self) -> tuple[Slot, Value]:
        """The residual entering the block, and the argument it comes in."""
        if self.lane is not None:
            return None, self.lane[0]
        found = hidden_input(self.run)
        assert found is not None, "a block run is chosen by having one"
        return found

    @property
    def leaving(self) -> Value | None:
        """The residual leaving the block."""
        return self.run.output() if self.lane is None else self.lane[1]

    @cached_property
    def children(self) -> list[Event]:
        """Module calls made directly by the block; those that read all streams of a stack are no sublayers."""
        direct = [e for e in self.events if not e.is_op and e.depth == self.run.depth + 1]
        return [e for e in direct if (taken := hidden_input(e)) is None or not self.is_stack(taken[1])]

    @cached_property
    def calls(self) -> list[Event]:
        """Module calls inside the block, those nested in others too."""
        return [e for e in self.events if not e.is_op]

    @cached_property
    def norms(self) -> list[Event]:
        return [e for e in self.events if not e.is_op and self.is_norm(e)]

    def is_norm(self, event: Event) -> bool:
        """A module that rescales each row to a fixed size: doubling its input leaves its output as it was."""
        module, given = event.module, event.output()
        if module is None or given is None:
            return False
        if any(p.dim() > 1 and p.shape != given.shape[-p.dim() :] for p in module.parameters()):
            return False
        return self.ignores_scale(event)

    def ignores_scale(self, event: Event) -> bool:
        """A module that gives for a row and for twice that row the same row of the same size."""
        module, taken, given = event.module, hidden_input(event), event.output()
        if module is None or taken is None or given is None or taken[1].shape != given.shape:
            return False
        key = id(module)
        if key not in self._norms:
            self._norms[key] = _ignores_scale(module, taken[1].data)
        return self._norms[key]

    def is_stack(self, value: Value) -> bool:
        """`value` is as large as all streams of the residual together, where there are several."""
        return self.stack is not None and value.tensor.numel() == self.residual[1].tensor.numel()

    def view(self, value: Value) -> View:
        """How a tensor with one row per token is laid out."""
        return self.stack if self.stack is not None and value.shape == self.residual[1].shape else rows(value)

    def gives(self, value: Value) -> bool:
        """Some module returns `value`."""
        return any(same(e.output(), value) for e in self.calls)

    def holder(self, value: Value) -> ModuleSite | None:
        """Where some module returns `value`, be it one of several outputs."""
        for event in reversed(self.calls):
            for slot, given in event.outputs:
                if same(given, value):
                    return ModuleSite(event.name, "output", slot, event.call, self.view(value), value.overwritten)
        return None

    @property
    def width(self) -> int:
        """Numbers in one residual stream of one token."""
        side_by_side = self.stack is not None and self.stack.layout == "streams_flat"
        return self.residual[1].shape[-1] // (self.stack.streams if self.stack and side_by_side else 1)

    @property
    def n_pos(self) -> int:
        """Tokens of the trace."""
        first = self.stack is not None and self.stack.layout == "streams_first"
        return self.residual[1].shape[2 if first else 1]

    def norm_giving(self, value: Value | None) -> Event | None:
        """The norm whose output is `value`."""
        return next((n for n in self.norms if same(n.output(), value)), None)

    def norm_reading(self, value: Value | None) -> Event | None:
        """The norm whose input is `value`."""
        return next((n for n in self.norms if (taken := hidden_input(n)) and same(taken[1], value)), None)


def hidden_input(event: Event) -> tuple[Slot, Value] | None:
    """The first floating-point argument with a position axis, and its slot."""
    return next(((s, v) for s, v in event.inputs if v.tensor.is_floating_point() and v.tensor.dim() >= 2), None)


def is_linear(event: Event) -> bool:
    """A module without children whose call multiplies by its own weight matrix, in either storage order."""
    module, taken, given = event.module, hidden_input(event), event.output()
    weight = own_weight(module)
    if taken is None or given is None or weight is None or weight.dim() != 2:
        return False
    leaf = not any(True for _ in module.children()) if module is not None else False
    return leaf and sorted(weight.shape) == sorted((taken[1].shape[-1], given.shape[-1]))


def own_weight(module: nn.Module | None) -> Tensor | None:
    """What a module multiplies by: its ``weight``, or the only matrix it has under another name."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) or module is None:
        return weight
    matrices = [p for p in module.parameters(recurse=False) if p.dim() == 2]
    return matrices[0] if len(matrices) == 1 else None


def is_heavy(event: Event) -> bool:
    """A module with weight matrices that takes and gives hidden states."""
    matrices = event.module is not None and any(p.dim() >= 2 for p in event.module.parameters())
    return matrices and event.output() is not None and hidden_input(event) is not None


def output_site(event: Event, view: View | None = None) -> ModuleSite:
    """Where the first tensor that `event` returns is read."""
    slot, value = next((s, v) for s, v in event.outputs if v is event.output())
    return ModuleSite(event.name, "output", slot, event.call, view or rows(value), value.overwritten)


def input_site(event: Event, view: View | None = None) -> ModuleSite:
    """Where the hidden states that `event` is handed are read."""
    found = hidden_input(event)
    assert found is not None, "an input site is asked for where there is an input"
    slot, value = found
    return ModuleSite(event.name, "input", slot, event.call, view or rows(value), value.overwritten)


def op_site(scope: Scope, made: Event, view: View, overwritten: bool = False) -> OpSite:
    """Where the result of an operation is read, counted from the last module call before it."""
    around = [scope.run, *(e for e in scope.calls if e.index < made.index < e.end)]
    holder = around[-1]
    passed = [e for e in scope.calls if holder.index < e.index and e.end <= made.index]
    last = max(passed, key=lambda e: e.end, default=None)
    since = holder.index + 1 if last is None else last.end
    nth = sum(e.is_op and e.name == made.name for e in scope.trace.events[since : made.index])
    after = None if last is None else (last.name, last.call)
    return OpSite(holder.name, made.name, nth, None, holder.call, view, overwritten, after)


def behind_norm(scope: Scope, sublayer: Event, inside: Event) -> Event:
    """The module around `inside` that a norm in `sublayer` hands the normed residual; else `sublayer` itself."""
    taken = hidden_input(sublayer)
    norm = scope.norm_reading(taken[1]) if taken is not None and scope.norm_giving(taken[1]) is None else None
    if norm is None or not sublayer.index < norm.index < inside.index:
        return sublayer
    nested = (e for e in scope.calls if norm.index < e.index <= inside.index < e.end)
    return next((e for e in nested if (read := hidden_input(e)) and same(read[1], norm.output())), sublayer)


def rows(value: Value) -> View:
    """The view of a tensor with one row per token: ``[batch, pos, d]``, folded or not."""
    if value.tensor.dim() == 4 and value.shape[1] == 1:
        return View("heads_first")
    return View("flat" if value.tensor.dim() == 2 else "tokens")


def mixes_tokens(event: Event) -> bool:
    """What `event` gives at later positions changes with the first position of its input; ``False`` if it fails."""
    found, before = hidden_input(event), event.output()
    if found is None or before is None or event.module is None or found[1].tensor.dim() != 3:
        return False
    slot, value = found
    changed = value.data.clone()
    changed[:, 0] = changed[:, 0].flip(-1) + 1
    args, kwargs = list(event.arguments[0]), dict(event.arguments[1])
    if isinstance(slot, int):
        args[slot] = changed
    else:
        kwargs[str(slot)] = changed
    try:
        with torch.no_grad():
            result = slots(event.module(*args, **kwargs))
    except CALL_ERRORS:
        return False
    after = next((x for _, x in result if x.shape == before.shape and x.is_floating_point()), None)
    return after is not None and not torch.allclose(after[:, 1:], before.data[:, 1:], rtol=1e-4, atol=1e-6)


def _ignores_scale(module: nn.Module, rows: Tensor) -> bool:
    weighted = max((p.dim() for p in module.parameters()), default=1)
    whole = rows.dim() > 3 or weighted > 1
    unit = rows[:1] if whole else rows.reshape(-1, rows.shape[-1])[:4]
    largest = unit.abs().max()
    if not bool(largest > 0):
        return False
    unit = unit / largest * 100
    call: Callable[[Tensor], Any] = module
    try:
        with torch.no_grad():
            once, twice = call(unit), call(2 * unit)
    except CALL_ERRORS:
        return False  # it takes more than a vector
    if not isinstance(once, Tensor) or once.shape != unit.shape or not bool(torch.isfinite(once).all()):
        return False
    return torch.allclose(once, twice, rtol=2e-2, atol=2e-2 * float(once.abs().max())) and bool(once.abs().max() > 0)
