"""Which channels of which linear map hold a tensor: by memory where it is a view, by value where it is a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from locant.anatomy.sites import Channels
from locant.anatomy.trace import Event, Value


def find_projection(
    only: Sequence[Value], reach: Sequence[Value], linears: Sequence[Event], n_pos: int
) -> tuple[Event, Channels | None] | None:
    """The linear map whose output holds the largest of the values in `only`, and its channels there.

    Args:
        only: values that lead to this tensor and to none of its siblings.
        reach: every value that leads to it.
        linears: the linear maps it may come from, in forward order; the last one it comes from counts.
        n_pos: positions in the trace.
    """
    reached = {id(v) for v in reach}
    for event in reversed(linears):
        output = event.output()
        if output is None or id(output) not in reached:
            continue
        for value in sorted(only, key=lambda v: v.tensor.numel(), reverse=True):
            index = channel_index(value, output, n_pos)
            if index is None:
                continue
            if torch.equal(index.flatten(), torch.arange(output.shape[-1])):
                return event, None
            if channels := Channels.of(index.tolist()):
                return event, channels
        return None
    return None


def channel_index(value: Value, output: Value, n_pos: int) -> Tensor | None:
    """The channel of `output` in each place of `value`, ``[head, d]``; ``None`` where some are computed."""
    heads = _by_head(value.tensor, n_pos)
    if heads is None or heads.numel() == 0:
        return None
    if value.tensor.untyped_storage().data_ptr() == output.tensor.untyped_storage().data_ptr():
        return _from_strides(heads, output.tensor)
    data = _by_head(value.data, n_pos)
    return _from_values(data, output.data) if data is not None else None


def _by_head(tensor: Tensor, n_pos: int) -> Tensor | None:
    """``[pos, head, d]`` of a one-prompt tensor in any of the layouts a projection passes through."""
    if tensor.dim() == 2 and tensor.shape[0] == n_pos:
        return tensor.unsqueeze(1)
    if tensor.dim() == 3 and tensor.shape[:2] == (1, n_pos):
        return tensor[0].unsqueeze(1)
    if tensor.dim() == 4 and tensor.shape[:2] == (1, n_pos):
        return tensor[0]
    if tensor.dim() == 4 and tensor.shape[0] == 1 and tensor.shape[2] == n_pos:
        return tensor[0].transpose(0, 1)
    return None


def _from_strides(heads: Tensor, output: Tensor) -> Tensor | None:
    pos_stride = output.stride(-2)
    if heads.stride(0) != pos_stride or output.stride(-1) != 1:
        return None
    start = heads.storage_offset() - output.storage_offset()
    n_heads, width = heads.shape[1:]
    index = start + torch.arange(n_heads)[:, None] * heads.stride(1) + torch.arange(width) * heads.stride(2)
    return index if int(index.min()) >= 0 and int(index.max()) < output.shape[-1] else None


def _from_values(heads: Tensor, output: Tensor) -> Tensor | None:
    if heads.dtype != output.dtype:
        return None
    channels = output.reshape(-1, output.shape[-1]).T.contiguous()
    wanted = heads.permute(1, 2, 0).contiguous()
    place = {column.numpy().tobytes(): i for i, column in enumerate(_words(channels))}
    found = [[place.get(column.numpy().tobytes(), -1) for column in _words(head)] for head in wanted]
    index = torch.tensor(found)
    return None if bool((index < 0).any()) else index


def _words(rows: Tensor) -> Tensor:
    """Rows as integers of their own width, so that equal means the same bits."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    return rows.view(kind).cpu()
