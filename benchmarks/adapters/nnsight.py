"""nnsight 0.8: traces of ``TransformersModel``. It reads the source of each ``with`` block from this file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import nnsight
import torch
from nnsight import TransformersModel
from torch import Tensor


class Adapter:
    """Traces of a dispatched model."""

    title = "nnsight"
    packages = ("nnsight",)
    settings = (
        "`tracer.stop()` after the last read, `use_cache=False` handed on to the model; a model loaded with "
        '`attn_implementation="eager"` for the pattern and for everything, `tracer.cache(include_inputs=True)`'
    )
    first_call = "reads saved in a trace, the whole forward"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.model = self._load("sdpa")

    def _load(self, attention: str) -> Any:
        return TransformersModel(
            self.folder, task="text-generation", dispatch=True, dtype=torch.float32, attn_implementation=attention
        )

    @cached_property
    def eager(self) -> Any:
        return self._load("eager")

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:
        blocks = [self.model.model.layers[layer] for layer in layers]
        if thrifty:
            with self.model.trace(ids, use_cache=False) as tracer:
                seen = nnsight.save([])
                for block in blocks:
                    seen.append(block.output)
                tracer.stop()
        else:
            with self.model.trace(ids):
                seen = nnsight.save([])
                for block in blocks:
                    seen.append(block.output)
        return seen

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        attention = self.eager.model.layers[layer].self_attn
        with self.eager.trace(ids, use_cache=False) as tracer:
            pattern = nnsight.save(attention.output[1])
            tracer.stop()
        return pattern

    def everything(self, ids: Tensor) -> dict[str, Tensor]:
        with self.eager.trace(ids, use_cache=False) as tracer:
            cache = tracer.cache(include_inputs=True)
        tensors: dict[str, Tensor] = {}
        for path in cache.keys():  # noqa: SIM118 - its own view, not a dict
            args, named = cache[path].inputs
            output = cache[path].output
            parts = {f"output.{i}": v for i, v in enumerate(output if isinstance(output, tuple) else (output,))}
            parts |= {f"input.{i}": v for i, v in enumerate(args)} | {f"input.{k}": v for k, v in named.items()}
            tensors |= {f"{path}.{part}": v for part, v in parts.items() if isinstance(v, Tensor)}
        return tensors
