"""pyvene 0.1.8: a ``CollectIntervention`` at each place, in an ``IntervenableModel`` made once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import pyvene
from torch import Tensor, nn

from adapters.plain import INNER_INPUTS, load

_FORWARD = {"use_cache": False, "logits_to_keep": 1}


class Adapter:
    """Interventions that collect."""

    title = "pyvene"
    packages = ("pyvene",)
    settings = (
        "`CollectIntervention(keep_last_dim=True)`, the intervenable model made beforehand; `use_cache=False` and "
        "`logits_to_keep=1` handed on to the model. It cannot stop early. Everything is the output of every module and "
        "the inputs that are no module's output"
    )
    first_call = "the whole forward"
    cannot: ClassVar[dict[str, str]] = {"pattern": "no component reads an attention pattern"}

    def __init__(self, folder: str) -> None:
        self.model = load(folder)
        self._made: dict[tuple[str, ...], Any] = {}

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:
        return self._collect(tuple(f"model.layers[{layer}].output" for layer in layers), ids, thrifty)

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        raise NotImplementedError

    def everything(self, ids: Tensor) -> dict[str, Tensor]:
        components: list[str] = []
        for path, module in self.model.named_modules():
            if not path or isinstance(module, nn.ModuleList) or path.endswith("rotary_emb"):
                continue
            component = re.sub(r"\.(\d+)", r"[\1]", path)
            components += [f"{component}.input"] * path.endswith(INNER_INPUTS) + [f"{component}.output"]
        return dict(zip(components, self._collect(tuple(components), ids, thrifty=False), strict=True))

    def _collect(self, components: tuple[str, ...], ids: Tensor, thrifty: bool) -> list[Tensor]:
        if components not in self._made:
            collect = [
                {"component": c, "intervention": pyvene.CollectIntervention(keep_last_dim=True)} for c in components
            ]
            self._made[components] = pyvene.IntervenableModel(collect, model=self.model)
        inputs = {"input_ids": ids, **(_FORWARD if thrifty else {})}
        (_, seen), _ = self._made[components](inputs, unit_locations=None)
        return seen
