"""TransformerLens 4: ``TransformerBridge``, with raw weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformer_lens import TransformerBridge

_FORWARD: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1, "output_attentions": False, "return_type": None}


class Adapter:
    """Cached runs of a bridge."""

    title = "TransformerLens (bridge)"
    packages = ("transformer-lens",)
    settings = (
        "`names_filter`; `stop_at_layer` for one layer; `return_type=None`, and handed on to the model "
        "`use_cache=False`, `logits_to_keep=1`, `output_attentions=False`. It runs eager attention always"
    )
    first_call = "`run_with_cache(ids, names_filter=...)`"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: str) -> None:
        self.bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:
        names = [f"blocks.{layer}.hook_resid_post" for layer in layers]
        options: dict[str, Any] = {}
        if thrifty:
            options |= _FORWARD
            if layers[-1] + 1 < self.bridge.cfg.n_layers:  # a stop after the last block it does not know
                options["stop_at_layer"] = layers[-1] + 1
        _, cache = self.bridge.run_with_cache(ids, names_filter=names, **options)
        return [cache[name] for name in names]

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        name = f"blocks.{layer}.attn.hook_pattern"
        _, cache = self.bridge.run_with_cache(ids, names_filter=[name], **_FORWARD)
        return cache[name]

    def everything(self, ids: Tensor) -> dict[str, Tensor]:
        _, cache = self.bridge.run_with_cache(ids, use_cache=False)
        return dict(cache.items())
