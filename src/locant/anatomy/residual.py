"""Follow the residual through one block execution: what is added to it, and what it passes through on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from locant.anatomy.projection import MOVES
from locant.anatomy.sites import ModuleSite, Site
from locant.anatomy.structure import (
    ADDITIONS,
    CONTRACTIONS,
    PRODUCTS,
    QUOTIENTS,
    Scope,
    hidden_input,
    op_site,
    output_site,
)
from locant.anatomy.trace import Event, Value, same

_UNCHANGED = MOVES | {"dropout", "to", "float", "type", "type_as", "half", "bfloat16", "double", "detach", "identity"}


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One thing that happens to the residual.

    Attributes:
        value: the residual after it.
        side: what an addition adds, or the matrix that mixes the streams.
        event: the norm the residual passes through, or the operation.
        factor: the number it is multiplied by; of a mix, how much of itself each stream keeps besides.
        weight: the parameter or buffer it is multiplied by, or that is added to it as a ``bias``, by name.
    """

    kind: Literal["add", "norm", "scale", "weight", "bias", "mix"]
    value: Value
    event: Event
    side: Value | None = None
    factor: float = 1.0
    weight: str = ""


class Flow:
    """The way of the residual from a block's input to its output; `steps` is ``None`` where it cannot be followed."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        out = scope.leaving
        self.steps = _path(scope, out, {}) if out is not None else None
        self._on_path = {id(scope.residual[1])} | {id(step.value) for step in self.steps or ()}
        self._sources: dict[int, set[int]] = {}

    @property
    def additions(self) -> list[Step]:
        return [step for step in self.steps or () if step.kind == "add"]

    def sources(self, value: Value) -> set[int]:
        """The indices of the events `value` was made by since the residual was last read."""
        known = self._sources.get(id(value))
        if known is None:
            known = set()
            queue, seen = [value], {id(value)}
            for current in queue:
                made = current.producer
                if made is None or made.index <= self.scope.run.index:
                    continue
                known.add(made.index)
                for v in made.sources:
                    if id(v) not in seen and not self._is_residual(v):
                        seen.add(id(v))
                        queue.append(v)
            self._sources[id(value)] = known
        return known

    def norm_before(self, value: Value) -> Event | None:
        """The norm that gives `value`; one with matrices of its own counts where it reads the residual alone."""
        made = (e for e in self.scope.calls if same(e.output(), value) and self._reads_residual(e))
        return self.scope.norm_giving(value) or next((e for e in made if self.scope.ignores_scale(e)), None)

    def _reads_residual(self, event: Event) -> bool:
        hidden = [v for _, v in event.inputs if v.tensor.is_floating_point()]
        values = [self.scope.residual[1], *(step.value for step in self.steps or ())]
        return len(hidden) == 1 and any(same(hidden[0], v) for v in values)

    def fed_by(self, value: Value, event: Event) -> bool:
        """Some operation inside `event` took part in `value`, other than through the residual."""
        if event.is_op:
            return event.index in self.sources(value)
        return any(event.index < index < event.end for index in self.sources(value))

    def addition_of(self, event: Event) -> Step | None:
        """The first addition to the residual that `event` takes part in."""
        return next((s for s in self.additions if s.side is not None and self.fed_by(s.side, event)), None)

    def share(self, step: Step, event: Event, others: Sequence[Event]) -> tuple[Value, list[Value]]:
        """What `event` alone contributes to an addition, and what is added beside it.

        A sum is taken apart where `event` made one of its terms and one of `others` the other one.
        """
        assert step.side is not None, "an addition has a side"
        value, beside = step.side, list[Value]()
        while True:
            made = value.producer
            if made is None or self._made_by_module(value, event):
                break
            if made.name in _UNCHANGED and len(made.inputs) == 1:
                value = made.inputs[0][1]
                continue
            terms = [v for _, v in made.inputs]
            if made.name not in ADDITIONS or len(terms) != 2:
                break
            own = [t for t in terms if self.fed_by(t, event)]
            rest = [t for t in terms if t not in own]
            if len(own) != 1 or not rest or not any(self.fed_by(rest[0], other) for other in others):
                break
            value = own[0]
            beside.append(rest[0])
        value = value if beside else step.side
        written = write_of(self.scope, value)
        return (value if written is None else written[0]), beside

    def between(self, start: Value, end: Value) -> list[Step] | None:
        """The steps from the residual `start` to the residual `end`, where both are on the path."""
        values = [self.scope.residual[1], *(step.value for step in self.steps or ())]
        held = unchanged_from(start), unchanged_from(end)  # a residual may be added in another dtype
        first = next((i for i, v in enumerate(values) if any(same(v, h) for h in held[0])), None)
        last = next((i for i in range(len(values) - 1, -1, -1) if any(same(values[i], h) for h in held[1])), None)
        if self.steps is None or first is None or last is None or last < first:
            return None
        return self.steps[first:last]

    def to(self, value: Value) -> list[Step] | None:
        """The steps from the block's input to any value made of it."""
        return _path(self.scope, value, {})

    def site(self, value: Value) -> Site | None:
        """Where `value` is read: a module's output if there is one, else the operation that makes it."""
        events = self.scope.events
        given = next((e for e in reversed(events) if not e.is_op and same(e.output(), value)), None)
        if given is not None and (held := given.output()) is not None:
            return output_site(given, self.scope.view(held))
        taken = next(
            (e for e in events if not e.is_op and (read := hidden_input(e)) is not None and same(read[1], value)), None
        )
        if taken is not None:
            slot, held = hidden_input(taken) or (None, value)
            return ModuleSite(taken.name, "input", slot, taken.call, self.scope.view(held), held.overwritten)
        made = value.producer
        if made is None:
            return None
        return op_site(self.scope, made, self.scope.view(value), value.overwritten)

    def _is_residual(self, value: Value) -> bool:
        return id(value) in self._on_path

    def _made_by_module(self, value: Value, event: Event) -> bool:
        return same(event.output(), value)


def scaled(value: Value) -> tuple[Value, float]:
    """`value` before it was multiplied by a constant, and the constant."""
    factor = 1.0
    while (made := value.producer) is not None and len(made.inputs) == 1:
        if made.name in _UNCHANGED:
            value = made.inputs[0][1]
        elif made.name in PRODUCTS and len(made.scalars) == 1:
            value, factor = made.inputs[0][1], factor * float(made.scalars[0])
        elif made.name in QUOTIENTS and len(made.scalars) == 1 and made.inputs[0][0] == 0:
            value, factor = made.inputs[0][1], factor / float(made.scalars[0])
        else:
            break
    return value, factor


def write_of(scope: Scope, side: Value) -> tuple[Value, Value] | None:
    """The vector ``[1, pos, d]`` and the weights ``[1, pos, stream]`` whose product is added to a stack of streams."""
    if scope.stack is None:
        return None
    product = unchanged_from(side)[-1].producer
    if product is None or product.name not in PRODUCTS or len(product.inputs) != 2:
        return None
    n_pos, n = scope.n_pos, scope.stack.streams
    factors = [unchanged_from(v) for _, v in product.inputs]
    for one, other in (factors, factors[::-1]):
        vectors = [v for v in one if v.shape == (1, n_pos, scope.width)]
        weights = [v for v in other if v.shape == (1, n_pos, n)]
        if vectors and weights:  # as a module gives them, before a cast to another dtype
            vector = next((v for v in vectors if scope.gives(v)), vectors[0])
            return vector, next((v for v in weights if scope.holder(v) is not None), weights[0])
    return None


def unchanged_from(value: Value) -> list[Value]:
    """`value` and everything it is the same numbers of, nearest first: moved, or in another dtype."""
    chain = [value]
    while (made := chain[-1].producer) is not None and made.name in _UNCHANGED and made.inputs:
        chain.append(made.inputs[0][1])
    return chain


def _path(scope: Scope, value: Value, known: dict[int, list[Step] | None]) -> list[Step] | None:
    """The steps from the block's input to `value`; ``None`` where `value` is not the residual."""
    if same(value, scope.residual[1]):
        return []
    if scope.stack is not None and not scope.is_stack(value):
        return None  # one stream of several is not the residual
    if id(value) not in known:
        known[id(value)] = None  # a value is not made of itself
        known[id(value)] = _longer_path(scope, value, known)
    return known[id(value)]


def _longer_path(scope: Scope, value: Value, known: dict[int, list[Step] | None]) -> list[Step] | None:
    if (norm := scope.norm_giving(value)) is not None:
        before = hidden_input(norm)
        way = _path(scope, before[1], known) if before is not None else None
        return None if way is None else [*way, Step("norm", value, norm)]
    made = value.producer
    if made is None or made.index <= scope.run.index or not made.inputs:
        return None
    own = scope.trace.own
    operands = [v for _, v in made.inputs if v.tensor.is_floating_point() and not own(v)]
    if made.name in _UNCHANGED:
        return _path(scope, operands[0], known) if operands else None
    if made.name in ADDITIONS and len(operands) == 2:
        ways = [_path(scope, operand, known) for operand in operands]
        for way, other in (ways, ways[::-1]):
            if way and other == [] and way[-1].kind == "mix" and len(way) == 1:
                return [Step("mix", value, made, way[-1].side, factor=1.0)]
        return _best(
            [*way, Step("add", value, made, side)]
            for taken, side in (operands, operands[::-1])
            if (way := _path(scope, taken, known)) is not None
        )
    if made.name in CONTRACTIONS and scope.stack is not None:
        square = (scope.stack.streams,) * 2
        for taken, matrix in (operands, operands[::-1]) if len(operands) == 2 else ():
            if matrix.shape[-2:] == square and (way := _path(scope, taken, known)) is not None:
                return [*way, Step("mix", value, made, matrix, factor=0.0)]
        return None
    if made.name in ADDITIONS and len(operands) == 1 and len(made.weights) == 1:
        way = _path(scope, operands[0], known)
        return None if way is None else [*way, Step("bias", value, made, weight=made.weights[0])]
    if made.name in PRODUCTS | QUOTIENTS and len(operands) == 1 and operands[0].shape == value.shape:
        way = _path(scope, operands[0], known)
        step = _multiplied(made, value)
        return None if way is None or step is None else [*way, step]
    return None


def _best(ways: Iterable[list[Step]]) -> list[Step] | None:
    """The way that passes through fewest norms: what is added to a residual may be made of it too."""
    return min(ways, key=lambda way: sum(step.kind != "add" for step in way), default=None)


def _multiplied(made: Event, value: Value) -> Step | None:
    if len(made.scalars) == 1:
        factor = float(made.scalars[0])
        if made.name in QUOTIENTS:
            factor = 1 / factor if made.inputs[0][0] == 0 and factor else 0.0
        return Step("scale", value, made, factor=factor) if factor else None
    if made.name in PRODUCTS and len(made.weights) == 1:
        return Step("weight", value, made, weight=made.weights[0])
    return None
