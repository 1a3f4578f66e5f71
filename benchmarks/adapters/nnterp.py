"""nnterp 1.3 on nnsight 0.7: the accessors of ``StandardizedTransformer``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import nnsight
import torch
from nnterp import StandardizedTransformer
from torch import Tensor


class Adapter:
    """Traces of a standardized model."""

    title = "nnterp"
    packages = ("nnterp", "nnsight")
    settings = (
        "`tracer.stop()` after the last read, `use_cache=False` handed on to the model; a model with "
        "`enable_attention_probs=True` for the pattern and for everything, which is every accessor saved in one trace "
        "(after one `tracer.cache()`, later traces of the same model fail: `KeyError: 'language_model'`)"
    )
    first_call = "reads saved in a trace, the whole forward"
    cannot: ClassVar[dict[str, str]] = {}

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.model = self._load()

    def _load(self, **options: bool) -> Any:
        return StandardizedTransformer(self.folder, device_map="cpu", dtype=torch.float32, **options)

    @cached_property
    def eager(self) -> Any:
        return self._load(enable_attention_probs=True)

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:
        if thrifty:
            with self.model.trace(ids, use_cache=False) as tracer:
                seen = nnsight.save([])
                for layer in layers:
                    seen.append(self.model.layers_output[layer])
                tracer.stop()
        else:
            with self.model.trace(ids):
                seen = nnsight.save([])
                for layer in layers:
                    seen.append(self.model.layers_output[layer])
        return seen

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        with self.eager.trace(ids, use_cache=False) as tracer:
            pattern = nnsight.save(self.eager.attention_probabilities[layer])
            tracer.stop()
        return pattern

    def everything(self, ids: Tensor) -> dict[str, Tensor]:
        model = self.eager
        with model.trace(ids, use_cache=False):
            seen = nnsight.save({})
            seen["token_embeddings"] = model.token_embeddings
            for i in range(model.num_layers):
                seen[f"layers_input.{i}"] = model.layers_input[i]
                seen[f"attentions_input.{i}"] = model.attentions_input[i]
                seen[f"attention_probabilities.{i}"] = model.attention_probabilities[i]
                seen[f"attentions_output.{i}"] = model.attentions_output[i]
                seen[f"mlps_input.{i}"] = model.mlps_input[i]
                seen[f"mlps_output.{i}"] = model.mlps_output[i]
                seen[f"layers_output.{i}"] = model.layers_output[i]
            seen["ln_final"] = model.ln_final.output
            seen["logits"] = model.logits
        return dict(seen)
