"""interp-engine 1.14: its eager backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import interp_engine
from torch import Tensor


class Adapter:
    """Captures of an eager model."""

    title = "interp-engine"
    packages = ("interp-engine",)
    settings = (
        '`attn_implementation="sdpa"` at loading, the default `"eager"` for the pattern and for everything, which is '
        "every point of every layer. It cannot stop early"
    )
    first_call = "a model loaded with its default, eager attention"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.model = self._load(attn_implementation="sdpa")

    def _load(self, **options: str) -> Any:
        return interp_engine.load_model(self.folder, backend="eager", dtype="float32", device="cpu", **options)

    @cached_property
    def eager(self) -> Any:
        return self._load()

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:
        points = [f"resid_post.{layer}" for layer in layers]
        cache = interp_engine.capture(self.model if thrifty else self.eager, ids, points)
        return [cache[point] for point in points]

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        return interp_engine.capture(self.eager, ids, [f"attn_probs.{layer}"])[f"attn_probs.{layer}"]

    def everything(self, ids: Tensor) -> dict[str, Tensor]:
        cache = interp_engine.capture(self.eager, ids, self._every_point)
        return {str(point): cache[point] for point in self._every_point}

    @cached_property
    def _every_point(self) -> list[Any]:
        points = []
        for spec in self.eager.points():
            places = range(self.eager.n_layers) if spec.scope is interp_engine.points.Scope.LAYER else [None]
            points += [interp_engine.Address(spec.name, layer) for layer in places]
        return [point for point in points if self.eager.serves(point)]
