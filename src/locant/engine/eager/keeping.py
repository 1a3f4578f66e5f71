"""What of the tensors of one forward a capture keeps: some positions, on some device, and no padding."""

from __future__ import annotations

import torch
from torch import Tensor

from locant.address import Address
from locant.anatomy.sites import Site
from locant.engine.cache import select
from locant.engine.plan import Plan
from locant.engine.prompts import Batch
from locant.errors import ModelError, PointUnavailable


class Kept:
    """What of a tensor is kept: some positions, on some device."""

    def __init__(
        self,
        plan: Plan,
        batch: Batch,
        rows: list[list[int]] | None,
        drop: bool,
        device: str | torch.device | None,
    ) -> None:
        self._layouts = {id(site): plan.layouts[a] for a, site in plan.reads.items()}
        self._rows, self._drop, self._device = rows, drop, device
        self._batch = batch

    def __call__(self, site: Site, tensor: Tensor) -> Tensor:
        self._check(site, tensor)
        if self._rows is not None:
            tensor = select(tensor, self._rows, self._layouts[id(site)].position_axis, self._drop)
        return tensor if self._device is None else tensor.to(self._device)

    def _check(self, site: Site, tensor: Tensor) -> None:
        """The tensor has the batch and the positions of these prompts, where its layout says it has positions."""
        layout, batch, longest = self._layouts[id(site)], len(self._batch), self._batch.longest
        if layout.position_axis is None:
            return
        wanted = (batch, layout.heads, longest, longest) if layout.matrix else (batch, longest)
        if tuple(tensor.shape[: len(wanted)]) != wanted:
            raise PointUnavailable(
                f"what was read at {site} has shape {tuple(tensor.shape)}",
                has=f"these prompts make it {wanted}, so the model computes something else there on them",
                instead="capture prompts of one length, or a point outside this module",
            )


def check_device(device: str | torch.device | None) -> None:
    """Raise where nothing can be put on `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device}: {str(error).splitlines()[0]}", instead="cpu is always there") from error


def blank_padding(tensors: dict[Address, Tensor], plan: Plan, batch: Batch, own: set[int]) -> None:
    """Positions past a prompt's end become NaN (-1): whatever the model computed there is no activation."""
    blank = ~batch.mask()
    for address, tensor in list(tensors.items()):
        axis = plan.layouts[address].position_axis
        if axis is None:
            continue
        if tensor.stride(0) == 0 or tensor.untyped_storage().data_ptr() in own:
            tensor = tensors[address] = tensor.clone()
        moved = tensor.movedim(axis, 1)
        moved[blank.to(tensor.device)] = float("nan") if tensor.is_floating_point() else -1
