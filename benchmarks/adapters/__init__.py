"""One file per tool, each doing the same jobs in the way its documentation says is best.

Every tool loads the same folder in float32 on the CPU, and is called under ``torch.no_grad``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:  # the script that only starts others needs no torch
    from torch import Tensor

RIVALS = ("by-hand", "transformer-lens", "nnsight", "nnterp", "pyvene", "interp-engine")


class Tool(Protocol):
    """What the benchmark asks of a tool.

    Attributes:
        title: its name in the tables.
        packages: those whose versions are recorded.
        settings: what was set so that it does nothing but the job.
        first_call: how its documentation first shows the call, where that differs.
        cannot: the jobs it has no way to do, and why.
    """

    title: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    settings: ClassVar[str]
    first_call: ClassVar[str]
    cannot: ClassVar[Mapping[str, str]]

    def __init__(self, folder: str) -> None: ...

    def residuals(self, ids: Tensor, layers: Sequence[int], *, thrifty: bool = True) -> list[Tensor]:
        """The residual stream after each of `layers`, by the thrifty call or by the first one."""
        ...

    def pattern(self, ids: Tensor, layer: int) -> Tensor:
        """The attention pattern of one layer, ``[batch, head, query, key]``."""
        ...

    def everything(self, ids: Tensor) -> Mapping[str, Tensor]:
        """All that it can read in one call."""
        ...


def tool(name: str, folder: str) -> Tool:
    """The adapter called `name`, with the model of `folder` loaded."""
    return import_module(f"adapters.{name.replace('-', '_')}").Adapter(folder)
