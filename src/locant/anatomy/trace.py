"""One recorded forward: every module call and tensor operation, and which tensor came from which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # pyright: ignore - torch has no public name for this question
from torch.overrides import TorchFunctionMode

from locant.anatomy.sites import Slot

# A value larger than this many numbers per traced token is no activation worth keeping (gathered expert weights).
_LARGEST_PER_TOKEN = 1 << 20

# What asks about a tensor without making one; seen very often, by this recorder's own bookkeeping too.
_QUERIES = frozenset(
    "numel dim size stride data_ptr storage_offset is_floating_point is_contiguous untyped_storage __len__ "
    "__bool__ item tolist get_device is_complex is_inference _is_view".split()
)


@dataclass(slots=True, eq=False)
class Value:
    """A tensor as it was at one moment; `data` still holds that moment after a later in-place write."""

    tensor: Tensor
    version: int
    data: Tensor
    producer: Event | None = None

    @property
    def overwritten(self) -> bool:
        return version_of(self.tensor) != self.version

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


@dataclass(slots=True, eq=False)
class Event:
    """A module call or an operation. Everything recorded in ``range(index, end)`` happened inside it.

    Attributes:
        weights: the model's own parameters and buffers among an operation's arguments, by name.
        func, arguments: an operation itself, and what it or a module was called with.
    """

    index: int
    name: str
    module: nn.Module | None
    depth: int
    call: int = 0
    end: int = 0
    inputs: list[tuple[Slot, Value]] = field(default_factory=list)
    outputs: list[tuple[Slot, Value]] = field(default_factory=list)
    scalars: tuple[float, ...] = ()
    weights: tuple[str, ...] = ()
    func: Callable[..., Any] | None = None
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})

    @property
    def is_op(self) -> bool:
        return self.module is None

    @property
    def sources(self) -> list[Value]:
        """The inputs whose numbers are used, and not their shape alone."""
        return [v for _, v in (self.inputs[:1] if self.name in _SHAPED_LIKE else self.inputs)]

    def output(self) -> Value | None:
        """The first floating-point output."""
        return next((v for _, v in self.outputs if v.tensor.is_floating_point()), None)


class Trace(TorchFunctionMode):
    """Records one forward of `model`; everything it saw stays alive until the trace is dropped."""

    def __init__(self, model: nn.Module, n_tokens: int) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._model = model
        named = [*model.named_parameters(), *model.named_buffers()]
        self._weights = {id(tensor): name for name, tensor in named}
        self._limit = _LARGEST_PER_TOKEN * n_tokens
        self._values: dict[int, Value] = {}
        self._by_storage: dict[int, list[Value]] = {}
        self._open: list[Event] = []
        self._calls: dict[str, int] = {}

    def record(self, run: Callable[[], Any]) -> Any:
        """Run a forward with recording on; the model carries no hook afterwards, whatever happens."""
        handles = [h for path, module in self._model.named_modules() for h in self._watch(path, module)]
        try:
            with torch.inference_mode(False), torch.no_grad(), self:
                return run()
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, path: str, module: nn.Module) -> Iterator[Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            event = self._begin(path, module)
            event.call = self._calls.get(path, 0)
            self._calls[path] = event.call + 1
            event.inputs = self._tensors([*enumerate(args), *kwargs.items()])
            event.arguments = (args, kwargs)
            self._open.append(event)

        def leave(_: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            event = self._open.pop()
            event.outputs = self._tensors(slots(output))
            event.end = len(self.events)

        yield module.register_forward_pre_hook(enter, with_kwargs=True, prepend=False)
        yield module.register_forward_hook(leave)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", str(func))
        if name in _QUERIES:
            return func(*args, **kwargs)
        inputs = self._tensors([*enumerate(flat(args)), *kwargs.items()])
        if _writes_in_place(name, kwargs) and inputs:
            self._preserve(inputs[0][1].tensor)
        result = func(*args, **kwargs)
        if not _holds_tensor(result):
            return result
        event = self._begin(name, None)
        event.inputs = inputs
        event.outputs = self._tensors(slots(result), producer=event)
        event.weights = tuple(self._weights[id(x)] for x in flat(args) if id(x) in self._weights)
        event.scalars = tuple(x for x in (*args, *kwargs.values()) if type(x) in (int, float))
        event.func, event.arguments = func, (args, kwargs)
        event.end = len(self.events)
        return result

    def _begin(self, name: str, module: nn.Module | None) -> Event:
        event = Event(len(self.events), name, module, len(self._open))
        self.events.append(event)
        return event

    def _tensors(
        self, items: Sequence[tuple[Slot, Any]] | Iterator[tuple[Slot, Any]], producer: Event | None = None
    ) -> list[tuple[Slot, Value]]:
        return [(slot, self._value(x, producer)) for slot, x in items if isinstance(x, Tensor) and self._kept(x)]

    def _kept(self, tensor: Tensor) -> bool:
        if is_batchedtensor(tensor):  # inside a vmap, it has no memory of its own
            return False
        return tensor.numel() <= self._limit and not isinstance(tensor, nn.Parameter)

    def _value(self, tensor: Tensor, producer: Event | None) -> Value:
        known = self._values.get(id(tensor))
        version = version_of(tensor)
        if known is not None and known.tensor is tensor and known.version == version:
            return known
        if producer is None and known is not None and known.tensor is tensor:
            producer = known.producer  # changed through another view of the same memory
        value = Value(tensor, version, tensor, producer)
        self._values[id(tensor)] = value
        self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(value)
        return value

    def _preserve(self, tensor: Tensor) -> None:
        for value in self._by_storage.get(tensor.untyped_storage().data_ptr(), ()):
            if value.data is value.tensor and not value.overwritten:
                value.data = value.tensor.clone()

    # ---- questions about what was recorded

    def own(self, value: Value) -> bool:
        """It is a parameter or a buffer of the model."""
        return id(value.tensor) in self._weights

    def weight_name(self, tensor: Tensor) -> str | None:
        """The name of a parameter or buffer of the model."""
        return self._weights.get(id(tensor))

    def weight(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        weight: Tensor = getattr(self._model.get_submodule(path), leaf)
        return weight.detach()

    def within(self, event: Event) -> list[Event]:
        return self.events[event.index + 1 : event.end]

    def calls(self, span: Sequence[Event]) -> list[Event]:
        return [e for e in span if e.module is not None]

    def nth(self, op: Event, scope: Event) -> int:
        """How many operations of that name ran before `op` inside `scope`."""
        return sum(e.is_op and e.name == op.name for e in self.events[scope.index + 1 : op.index])

    def ancestors(self, value: Value, since: int) -> list[Value]:
        """Every value `value` was computed from, nearest first, looking no further back than event `since`."""
        seen: dict[int, Value] = {}
        queue = [value]
        for current in queue:
            producer = current.producer
            if id(current) in seen:
                continue
            seen[id(current)] = current
            if producer is not None and producer.index > since:
                queue.extend(producer.sources)
        return list(seen.values())


def same(a: Value | None, b: Value | None) -> bool:
    """Both are the same numbers of the same memory at the same moment (a reshape counts as the same)."""
    if a is None or b is None:
        return False
    if a is b:
        return True
    x, y = a.tensor, b.tensor
    return (
        x.data_ptr() == y.data_ptr()
        and x.numel() == y.numel()
        and x.dtype == y.dtype
        and a.version == b.version
        and x.is_contiguous() == y.is_contiguous()
    )


def version_of(tensor: Tensor) -> int:
    """How often its memory was written to; nothing counts that for a tensor made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def slots(output: Any) -> list[tuple[Slot, Any]]:
    """The tensors of a module's output by the slot that fetches them."""
    if isinstance(output, Tensor):
        return [(None, output)]
    if isinstance(output, Mapping):
        return [(k, v) for k, v in output.items() if isinstance(v, Tensor)]
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [(i, v) for i, v in enumerate(output) if isinstance(v, Tensor)]
    return []


def flat(values: Sequence[Any]) -> list[Any]:
    """Arguments one after another, those inside a list or tuple too."""
    return [y for x in values for y in (x if isinstance(x, (list, tuple)) else (x,))]


def _holds_tensor(result: Any) -> bool:
    if isinstance(result, (list, tuple)):
        return any(isinstance(x, Tensor) for x in result)
    return isinstance(result, Tensor)


def _writes_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    if "out" in kwargs:
        return True
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


_SHAPED_LIKE = frozenset(["view_as", "expand_as", "reshape_as", "type_as", "to"])
_NOT_IN_PLACE = ("__invert__", "__index__", "__int__")
