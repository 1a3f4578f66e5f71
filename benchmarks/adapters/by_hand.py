"""Plain Hugging Face with forward hooks written by hand: the least that any tool can cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from adapters.plain import INNER_INPUTS, load


class Enough(Exception):
    """Raised by the last hook, so that nothing after it runs."""


class Adapter:
    """Hooks registered and removed around each forward."""

    title = "hooks by hand"
    packages = ()
    settings = (
        "the model without its unembedding, `use_cache=False`, and an exception raised by the last hook; "
        '`attn_implementation="eager"` for the pattern and for everything, which is the output of every module and '
        "the inputs that are no module's output"
    )
    first_call = "a hook on each block, the whole forward"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.model = load(folder)

    @cached_property
    def eager(self) -> Any:
        return load(self.folder, "eager")

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:
        paths = [f"model.layers.{layer}" for layer in layers]
        if thrifty:
            seen = _read(self.model, paths, [], lambda: self.model.model(ids, use_cache=False), last=paths[-1])
        else:
            seen = _read(self.model, paths, [], lambda: self.model(ids))
        return [seen[path] for path in paths]

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        path = f"model.layers.{layer}.self_attn"
        return _read(self.eager, [path], [], lambda: self.eager.model(ids, use_cache=False), last=path)[path][1]

    def everything(self, ids: Tensor) -> dict[str, Tensor]:
        paths = [path for path, module in self.eager.named_modules() if path and not isinstance(module, nn.ModuleList)]
        inputs = [path for path in paths if path.endswith(INNER_INPUTS)]
        seen = _read(self.eager, paths, inputs, lambda: self.eager(ids, use_cache=False))
        values = {name: value if isinstance(value, tuple) else (value,) for name, value in seen.items()}
        return {f"{n}[{i}]": v for n, each in values.items() for i, v in enumerate(each) if isinstance(v, Tensor)}


def _read(
    model: nn.Module,
    outputs: Sequence[str],
    inputs: Sequence[str],
    forward: Callable[[], object],
    last: str | None = None,
) -> dict[str, Any]:
    """What modules return, and the first argument of some, during one forward."""
    seen: dict[str, Any] = {}

    def output_of(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: Any) -> None:
            seen[path] = output
            if path == last:
                raise Enough

        return hook

    def input_of(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            seen[f"{path} input"] = args[0]

        return hook

    with ExitStack() as hooks:
        for path in outputs:
            hooks.callback(model.get_submodule(path).register_forward_hook(output_of(path)).remove)
        for path in inputs:
            hooks.callback(model.get_submodule(path).register_forward_pre_hook(input_of(path)).remove)
        with suppress(Enough):
            forward()
    return seen
