"""Reading a forward while it runs: hooks at module sites, a torch function mode at sites inside a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from locant.address import Address
from locant.anatomy.sites import ModuleSite, OpSite, Site, attention_scores
from locant.anatomy.trace import flat

Keep = Callable[[Site, Tensor], Tensor]


class Stopped(BaseException):
    """Everything asked for has been read; no exception handler of a model may swallow this."""


class Taps:
    """Which modules of one model to watch for a set of addresses. Reusable; a run's state is its own."""

    def __init__(self, model: nn.Module, reads: Mapping[Address, Site]) -> None:
        self._sites: dict[Site, list[Address]] = {}
        for address, site in reads.items():
            self._sites.setdefault(site, []).append(address)
        self._watched: dict[str, list[Site]] = {}
        for site in self._sites:
            self._watched.setdefault(site.path, []).append(site)
        self._modules = {path: model.get_submodule(path) for path in self._watched}
        self._copied: set[Site] = {s for s in self._sites if s.overwritten}

    def run(
        self, forward: Callable[[], object], batch: int, keep: Keep, grad: bool = False
    ) -> dict[Address, Tensor]:
        """Run `forward` until every site has been read, and give the tensors read.

        A tensor that nothing overwrites later is kept by reference. One that is overwritten, which shows in its
        version counter, makes the forward run again with that site copied; this is remembered.
        """
        run = _Run(self._sites, self._copied, batch, keep, grad)
        with ExitStack() as hooks:
            for path, sites in self._watched.items():
                _watch(self._modules[path], sites, run, hooks)
            try:
                forward()
            except Stopped:
                pass
        changed = run.changed()
        if changed:
            self._copied |= changed
            return self.run(forward, batch, keep, grad)
        return run.read


class _Run:
    """What one forward has read so far."""

    def __init__(
        self, sites: Mapping[Site, list[Address]], copied: set[Site], batch: int, keep: Keep, grad: bool
    ) -> None:
        self.read: dict[Address, Tensor] = {}
        self.grad = grad
        self._addresses = sites
        self._copied = copied
        self._batch = batch
        self._keep = keep
        self._left = len(sites)
        self._kept: list[tuple[Site, Tensor, int]] = []

    def take(self, site: Site, tensor: Tensor) -> None:
        value = site.view.read(tensor, self._batch)
        if site in self._copied and value.data_ptr() == tensor.data_ptr():
            value = value.clone()
        value = self._keep(site, value)
        self._kept.append((site, value, value._version))
        for address in self._addresses[site]:
            self.read[address] = value
        self._left -= 1
        if self._left == 0:
            raise Stopped

    def changed(self) -> set[Site]:
        return {site for site, tensor, version in self._kept if tensor._version != version}


def _watch(module: nn.Module, sites: Iterable[Site], run: _Run, hooks: ExitStack) -> None:
    inputs = [s for s in sites if isinstance(s, ModuleSite) and s.side == "input"]
    outputs = [s for s in sites if isinstance(s, ModuleSite) and s.side == "output"]
    inside = [s for s in sites if isinstance(s, OpSite)]
    calls = -1
    modes: list[_Inside] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        for site in inputs:
            if site.call == calls:
                run.take(site, kwargs[site.slot] if isinstance(site.slot, str) else args[site.slot or 0])
        here = [s for s in inside if s.call == calls]
        if here:
            mode = _Inside(here, run)
            mode.__enter__()
            modes.append(mode)

    def leave(_: nn.Module, args: object, output: Any) -> None:
        if modes:
            modes.pop().__exit__(None, None, None)
        for site in outputs:
            if site.call == calls:
                run.take(site, output if site.slot is None else output[site.slot])

    hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    hooks.callback(module.register_forward_hook(leave, always_call=bool(inside)).remove)


class _Inside(TorchFunctionMode):
    """Counts the operations of one module call and reads the arguments and results asked for."""

    def __init__(self, sites: Iterable[OpSite], run: _Run) -> None:
        super().__init__()
        self._sites: dict[str, list[OpSite]] = {}
        for site in sites:
            self._sites.setdefault(site.op, []).append(site)
        self._seen = dict.fromkeys(self._sites, 0)
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sites = self._sites.get(getattr(func, "__name__", ""))
        if sites is None:
            return func(*args, **kwargs)
        nth = self._seen[sites[0].op]
        self._seen[sites[0].op] = nth + 1
        here = [s for s in sites if s.nth == nth]
        for site in here:
            if isinstance(site.slot, int):
                self._run.take(site, flat([*args, *kwargs.values()])[site.slot])
        hidden = {s.slot: s for s in here if isinstance(s.slot, str)}
        result = self._recomputed(hidden, *args, **kwargs) if hidden else None
        if result is None:
            result = func(*args, **kwargs)
        for site in here:
            if site.slot is None:
                self._run.take(site, result)
        return result

    def _recomputed(
        self,
        sites: Mapping[str, OpSite],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: object,
    ) -> Tensor | None:
        """Read the scores and probabilities of a fused attention call.

        With gradients on, the result is made from these very tensors and returned, so that the graph from them
        to the logits exists; else the kernel makes its own, and an unedited forward keeps its bits.
        """
        scores = attention_scores(query, key, attn_mask, is_causal, scale).to(query.dtype)
        n_heads = next(iter(sites.values())).view.n_heads or scores.shape[1]
        scores = scores.reshape(scores.shape[0], n_heads, -1, scores.shape[-1])
        if "scores" in sites:
            self._run.take(sites["scores"], scores)
        if "probs" not in sites and not self._run.grad:
            return None
        probs = scores.float().softmax(-1).to(query.dtype)
        if "probs" in sites:
            self._run.take(sites["probs"], probs)
        if not self._run.grad:
            return None
        value = value.repeat_interleave(n_heads // value.shape[1], 1)
        return (probs @ value).reshape(*query.shape[:-1], value.shape[-1])


def inference(grad: bool) -> Any:
    """Without gradients, but with plain tensors that may enter a graph later."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(grad))
    return stack
