"""locant, as a user calls it: it runs no further than the last thing asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

import locant


class Adapter:
    """Captures by address."""

    title = "**locant**"
    packages = ("locant",)
    settings = "nothing; it stops by itself once everything asked for has been read"
    first_call = ""
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: str) -> None:
        self.model = locant.load_model(folder, dtype=torch.float32)

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:  # noqa: ARG002
        addresses = [f"resid_post.{layer}" for layer in layers]
        cache = self.model.capture(ids, addresses)
        return [cache[address] for address in addresses]

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        return self.model.capture(ids, f"attn_probs.{layer}")[f"attn_probs.{layer}"]

    def everything(self, ids: Tensor) -> dict[str, Tensor]:
        return dict(self.model.capture(ids, self.model.points().served()))
