"""Reading and changing a forward while it runs: hooks at module sites, a torch function mode inside modules."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from threading import local
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from locant.address import Address
from locant.anatomy.sites import ModuleSite, OpSite, Site, Slot, attention_scores
from locant.anatomy.trace import version_of
from locant.errors import PointUnavailable
from locant.points import POINTS

_RECOMPUTED = ("scores", "probs")
Keep = Callable[[Site, Tensor], Tensor]
Change = Callable[[Address, Tensor], Tensor]
"""Gives the tensor of a point as it is to be, from what the model computed."""


class Stopped(BaseException):
    """Everything asked for has been read; no exception handler of a model may swallow this."""


class Taps:
    """Which modules of one model to watch for a set of addresses. Reusable; a run's state is its own.

    Where one tensor is several points, each is changed and then read before the next in forward order is.
    """

    def __init__(
        self, model: nn.Module, reads: Mapping[Address, Site], writes: Mapping[Address, Site] | None = None
    ) -> None:
        written = {address: copy(site) for address, site in (writes or {}).items()}
        groups: dict[object, tuple[Site, list[Address]]] = {}
        for address, site in reads.items():  # what is changed may be another tensor at each of its names
            groups.setdefault(id(site) if written else site, (site, []))[1].append(address)
        self._reads = list(groups.values())
        self._writes = {id(site): address for address, site in written.items()}
        self._kept_alive = list(written.values())
        self._watched: dict[str, _Watched] = {}
        every = [(*_rank(a), 0, site) for a, site in written.items()]
        every += [(*_rank(addresses[0]), 1, site) for site, addresses in self._reads]
        for *_, site in sorted(every, key=lambda one: one[:-1]) if written else every:
            self._watched.setdefault(site.path, _Watched()).add(site)
            if isinstance(site, OpSite) and site.after is not None:
                self._watched.setdefault(site.after[0], _Watched()).anchor = True
        self._model = model
        self._met = {path: ref(model.get_submodule(path)) for path in self._watched}
        self._parts = [(path.split(".") if path else [], met) for path, met in self._met.items()]
        # by identity: hashing a site with its view costs more than reading it
        self._addresses = {id(site): addresses for site, addresses in self._reads}
        self._copied = {id(site) for site, _ in self._reads if site.overwritten}

    def outdated(self) -> bool:
        """Some module that is watched has been replaced by another, or is gone."""
        return any(_child(self._model, parts) is not met() for parts, met in self._parts)

    def try_all(self, forward: Callable[[], object], batch: int) -> dict[Address, Tensor]:
        """Read what can be read: a site whose tensor is not laid out as its view says is left out."""
        return self._once(_Run(self._addresses, self._copied, batch, lambda _, tensor: tensor, lenient=True), forward)

    def run(
        self,
        forward: Callable[[], object],
        batch: int,
        keep: Keep,
        grad: bool = False,
        change: Change | None = None,
    ) -> dict[Address, Tensor]:
        """Run `forward` until every site has been read, and give the tensors read.

        A tensor that nothing overwrites later is kept by reference. One that is overwritten, which shows in its
        version counter, makes the forward run again with that site copied; this is remembered.
        """
        run = _Run(self._addresses, self._copied, batch, keep, grad)
        if change is not None:
            run.changes(self._writes, change)
        self._once(run, forward)
        unread = [a for _, addresses in self._reads for a in addresses if a not in run.read]
        if unread:
            raise PointUnavailable(
                f"{unread[0]}: the module it is read at did not run in this forward",
                has="the model has changed since it was examined",
                instead="model.examine() finds and proves its points anew",
            )
        changed = run.changed()
        if changed:
            self._copied |= changed
            return self.run(forward, batch, keep, grad, change)
        return run.read

    def _once(self, run: _Run, forward: Callable[[], object]) -> dict[Address, Tensor]:
        with ExitStack() as hooks:
            hooks.callback(run.close)
            for path, watched in self._watched.items():
                module = self._met[path]()
                if module is not None:
                    _watch(path, module, watched, run, hooks)
            hooks.enter_context(_innermost(run))
            with suppress(Stopped):
                forward()
        return run.read


def _rank(address: Address) -> tuple[int, int]:
    """The order in which points that are one tensor follow each other; a module's output comes after them."""
    return address.layer or 0, list(POINTS).index(address.name) if address.name in POINTS else len(POINTS)


_RUNNING = local()


def running() -> list[_Run]:
    """The captures this thread is inside of, the innermost last."""
    return getattr(_RUNNING, "stack", [])


def _child(module: nn.Module | None, parts: Iterable[str]) -> nn.Module | None:
    """``get_submodule``, ten times faster, since every capture asks for every module it watches."""
    for name in parts:
        module = module._modules.get(name) if module is not None else None  # pyright: ignore[reportPrivateUsage]
    return module


def _current() -> _Run | None:
    stack: list[_Run] | None = getattr(_RUNNING, "stack", None)
    return stack[-1] if stack else None


@contextmanager
def _innermost(run: _Run) -> Generator[None]:
    _RUNNING.stack = [*running(), run]
    try:
        yield
    finally:
        _RUNNING.stack = running()[:-1]


class _Run:
    """What one forward has read so far."""

    def __init__(
        self,
        addresses: Mapping[int, list[Address]],
        copied: set[int],
        batch: int,
        keep: Keep,
        grad: bool = False,
        lenient: bool = False,
    ) -> None:
        self.read: dict[Address, Tensor] = {}
        self.grad = grad
        self._addresses = addresses
        self._copied = copied
        self._batch = batch
        self._keep = keep
        self._lenient = lenient
        self._left = len(addresses)
        self._kept: list[tuple[Site, Tensor, int]] = []
        self._inside: list[_Inside] = []
        self._writes: Mapping[int, Address] = {}

    def changes(self, writes: Mapping[int, Address], change: Change) -> None:
        """Change the points at these sites, too."""
        self._writes, self._change = writes, change

    def writes(self, site: Site) -> bool:
        return id(site) in self._writes

    def _put(self, site: Site, tensor: Tensor) -> Tensor:
        """The tensor the model goes on with, for the point to be what it is changed to."""
        in_place = isinstance(site, ModuleSite) and site.in_place
        held = tensor.clone() if in_place and self.grad else tensor  # a graph may need what is overwritten
        value = site.view.read(held, self._batch)
        written = site.view.write(held, self._change(self._writes[id(site)], value))
        return tensor.copy_(written) if in_place else written

    def take(self, site: Site, tensor: Tensor) -> Tensor:
        """Change or read one site, and give the tensor the model goes on with.

        With gradients on, that is made from the tensor read wherever the two are not one, so that the graph from
        what was captured to everything after it exists.
        """
        if id(site) in self._writes:
            return self._put(site, tensor)
        try:
            value = site.view.read(tensor, self._batch)
        except (RuntimeError, IndexError):
            if self._lenient:
                return tensor
            raise
        copied = id(site) in self._copied
        if copied and value.data_ptr() == tensor.data_ptr():
            value = value.clone()
        onward = tensor
        if self.grad and value is not tensor:
            onward = site.view.write(tensor, value)
            onward = onward.clone() if copied else onward
        value = self._keep(site, value)
        self._kept.append((site, value, version_of(value)))
        for address in self._addresses[id(site)]:
            self.read[address] = value
        self._left -= 1
        if self._left == 0:
            raise Stopped
        return onward

    def changed(self) -> set[int]:
        return {id(site) for site, tensor, version in self._kept if version_of(tensor) != version}

    def enter(self, sites: Iterable[OpSite]) -> None:
        """Watch the operations of the module call that begins here."""
        mode = _Inside(sites, self)
        mode.__enter__()
        self._inside.append(mode)

    def leave(self) -> None:
        self._inside.pop().__exit__(None, None, None)

    def passed(self, path: str, call: int) -> None:
        """The call of a module that some operations are counted from has ended."""
        for mode in self._inside:
            mode.count_from((path, call))

    def close(self) -> None:
        """Stop watching calls that never ended, because the forward was stopped or failed inside them."""
        while self._inside:
            self.leave()


@dataclass(slots=True)
class _Watched:
    """What is read of one module."""

    inputs: list[ModuleSite] = field(default_factory=list)
    outputs: list[ModuleSite] = field(default_factory=list)
    inside: list[OpSite] = field(default_factory=list)
    anchor: bool = False

    def add(self, site: Site) -> None:
        if isinstance(site, OpSite):
            self.inside.append(site)
        else:
            (self.inputs if site.side == "input" else self.outputs).append(site)


def _watch(path: str, module: nn.Module, watched: _Watched, run: _Run, hooks: ExitStack) -> None:
    """Hook one module for the length of one forward, only where something of it is read."""
    inputs, outputs, inside = watched.inputs, watched.outputs, watched.inside
    entered, left = count(), count()

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _current() is not run:
            return None  # another forward of the same model: another thread's, or one inside this one
        call = next(entered)
        for site in inputs:
            if site.call == call:
                where: Any = kwargs if isinstance(site.slot, str) else args
                onward = run.take(site, where[site.slot])
                if onward is not where[site.slot]:
                    args, kwargs = with_slot(args, site.slot, onward), with_slot(kwargs, site.slot, onward)
        if inside:
            run.enter([s for s in inside if s.call == call])
        return args, kwargs

    def leave(_: nn.Module, _args: object, output: Any) -> Any:
        if _current() is not run:
            return None
        if inside:
            run.leave()
        call = next(left)
        for site in outputs:
            if site.call == call:
                onward = run.take(site, output if site.slot is None else output[site.slot])
                output = onward if site.slot is None else with_slot(output, site.slot, onward)
        if watched.anchor:
            run.passed(path, call)
        return output

    if inputs or inside:
        hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    if outputs or inside or watched.anchor:
        hooks.callback(module.register_forward_hook(leave).remove)


def with_slot(values: Any, slot: Slot, value: Tensor) -> Any:
    """`values` with one element changed, in a new container of its kind where it is another tensor."""
    if isinstance(values, dict) != isinstance(slot, str) or values[slot] is value:
        return values
    if isinstance(values, tuple) and type(values) is tuple:
        return (*values[:slot], value, *values[slot + 1 :])  # type: ignore[operator, misc]
    changed: Any = copy(values)
    changed[slot] = value
    return changed


class _Inside(TorchFunctionMode):
    """Counts the operations of one module call and reads the arguments and results asked for."""

    def __init__(self, sites: Iterable[OpSite], run: _Run) -> None:
        super().__init__()
        self._sites: dict[str, list[OpSite]] = {}
        for site in sites:
            self._sites.setdefault(site.op, []).append(site)
        self._run = run
        self.count_from(None)

    def count_from(self, passed: tuple[str, int] | None) -> None:
        """Count operations anew for the sites that are found from here."""
        if passed is None:
            self._seen = {(op, site.after): 0 for op, sites in self._sites.items() for site in sites}
            self._passed: set[tuple[str, int] | None] = {None}
            return
        self._passed.add(passed)
        for key in self._seen:
            if key[1] == passed:
                self._seen[key] = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = kwargs or {}
        sites = self._sites.get(getattr(func, "__name__", ""))
        if sites is None:
            return func(*args, **named)
        counts = {since: self._count(sites[0].op, since) for since in {s.after for s in sites}}
        here = [s for s in sites if s.nth == counts[s.after]]
        for site in here:
            if site.slot in _RECOMPUTED or site.slot is None:
                continue
            where: Any = named if isinstance(site.slot, str) else args
            onward = self._run.take(site, where[site.slot])
            args, named = with_slot(args, site.slot, onward), with_slot(named, site.slot, onward)
        hidden = [s for s in here if s.slot in _RECOMPUTED]
        result = self._recomputed(hidden, *args, **named) if hidden else None
        if result is None:
            result = func(*args, **named)
        for site in here:
            if site.slot is None:
                result = self._run.take(site, result)
        return result

    def _count(self, op: str, since: tuple[str, int] | None) -> int:
        """How many of these operations ran since then, this one left out; none before that."""
        if since not in self._passed:
            return -1
        nth = self._seen[op, since]
        self._seen[op, since] = nth + 1
        return nth

    def _recomputed(
        self,
        sites: Iterable[OpSite],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        _dropout: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: object,
    ) -> Tensor | None:
        """Change and read the scores and probabilities of a fused attention call.

        With gradients on, or where one is changed, the result is made from these very tensors and returned, so that
        everything later is made of them; else the kernel makes its own, and an unedited forward keeps its bits.
        """
        with torch.autocast(query.device.type, enabled=False):
            scores = attention_scores(query, key, attn_mask, is_causal, scale)
        run, sites = self._run, list(sites)
        n_heads = sites[0].view.n_heads or scores.shape[1]
        scores = scores.reshape(scores.shape[0], n_heads, -1, scores.shape[-1])
        for site in sites:
            if site.slot == "scores":
                scores = run.take(site, scores)
        makes = run.grad or any(run.writes(site) for site in sites)
        if not makes and all(site.slot == "scores" for site in sites):
            return None
        probs = scores.softmax(-1).to(query.dtype)
        for site in sites:
            if site.slot == "probs":
                probs = run.take(site, probs)
        if not makes:
            return None
        value = value.repeat_interleave(n_heads // value.shape[1], 1)
        return (probs @ value).reshape(*query.shape[:-1], value.shape[-1])


@contextmanager
def disturbed(model: nn.Module, site: Site) -> Generator[None]:
    """Add noise, as large as the tensor, to what a module is handed at an input site."""

    def disturb(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where: Any = kwargs if isinstance(site.slot, str) else args
        tensor: Tensor = where[site.slot]
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
        changed = tensor + noise * tensor.float().std().to(tensor.dtype)
        return with_slot(args, site.slot, changed), with_slot(kwargs, site.slot, changed)

    hook = model.get_submodule(site.path).register_forward_pre_hook(disturb, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def inference(grad: bool) -> Any:
    """Without gradients, but with plain tensors that may enter a graph later."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(grad))
    return stack
