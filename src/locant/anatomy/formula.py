"""An elementwise computation as a forward ran it, to be run again on other numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locant.anatomy.projection import MOVES
from locant.anatomy.structure import CONTRACTIONS
from locant.anatomy.trace import Event, Trace, Value, flat

_CASTS = frozenset(["to", "type_as", "type", "float", "half", "bfloat16", "double"])


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor the computation is given, or a weight of the model, by name."""

    name: str
    weight: bool = False


@dataclass(frozen=True, slots=True)
class Formula:
    """One operation on what other operations, named tensors and constants give."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, tensors: Callable[[Named], Tensor]) -> Tensor:
        """The result where `tensors` gives each named tensor; what it gives is left unchanged."""
        result = self.func(*(_given(x, tensors) for x in self.args), **self.kwargs)
        assert isinstance(result, Tensor), "an operation with several results is no part of a formula"
        return result


def _given(argument: Any, tensors: Callable[[Named], Tensor]) -> Any:
    if isinstance(argument, Formula):
        return argument.of(tensors)
    if isinstance(argument, Named):
        return tensors(argument).clone()  # the operation may write in place
    return argument


def formula_of(value: Value, trace: Trace, since: int, name: Callable[[Value], str | None]) -> Formula | Named | None:
    """How `value` is made of the values that `name` has a name for; ``None`` where more than those is needed.

    Args:
        value: what the formula gives.
        trace: the recorded forward.
        since: the event before which nothing is looked at.
        name: the name of a value the formula may be given.
    """
    if (known := name(value)) is not None:
        return Named(known)
    made = value.producer
    if made is None or made.index <= since or made.func is None or len(made.outputs) != 1:
        return None
    if made.name in CONTRACTIONS or made.name == "linear":
        return None
    if made.name in MOVES | _CASTS:
        return _moved(made, value, trace, since, name)
    args = _arguments(made, trace, since, name)
    return None if args is None else Formula(made.func, args, made.arguments[1])


def _moved(
    made: Event, value: Value, trace: Trace, since: int, name: Callable[[Value], str | None]
) -> Formula | Named | None:
    """What is moved, cast or spread over the tokens, where no number of it is left out."""
    origin = made.arguments[0][0]
    weight = trace.weight_name(origin) if isinstance(origin, Tensor) else None
    if weight is not None and origin.shape == value.shape[-1:]:
        return Named(weight, weight=True)
    taken = dict(made.inputs).get(0)
    before = formula_of(taken, trace, since, name) if taken is not None else None
    if before is None or taken is None or taken.tensor.numel() != value.tensor.numel():
        return None
    return Formula(torch.Tensor.to, (before, value.tensor.dtype), {}) if made.name in _CASTS else before


def _arguments(made: Event, trace: Trace, since: int, name: Callable[[Value], str | None]) -> tuple[Any, ...] | None:
    args, kwargs = made.arguments
    if any(isinstance(x, Tensor) for x in (*kwargs.values(), *_nested(args))):
        return None
    inputs, found = dict(made.inputs), list[Any]()
    for slot, argument in enumerate(args):
        if not isinstance(argument, Tensor):
            found.append(argument)
        elif (weight := trace.weight_name(argument)) is not None:
            found.append(Named(weight, weight=True))
        elif slot in inputs and (part := formula_of(inputs[slot], trace, since, name)) is not None:
            found.append(part)
        else:
            return None
    return tuple(found)


def _nested(args: Sequence[Any]) -> list[Any]:
    return [x for x in flat(args) if not any(x is a for a in args)]
