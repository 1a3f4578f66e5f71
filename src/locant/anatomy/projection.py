"""Which channels of which linear map hold a tensor: by memory where it is a view, by value where it is a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

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
            once = index.unique_consecutive(dim=0)  # a head repeated over its query group is one head
            if channels := Channels.of(once.flatten().tolist()):
                return event, channels
        return None
    return None


def channel_index(value: Value, output: Value, n_pos: int) -> Tensor | None:
    """The channel of `output` in each place of `value`, ``[head, d]``; ``None`` where it is no copy of some."""
    heads = _by_head(value.tensor, n_pos)
    if heads is None or heads.numel() == 0 or not _is_copy(value, output):
        return None
    if value.tensor.untyped_storage().data_ptr() == output.tensor.untyped_storage().data_ptr():
        return _from_strides(heads, output.tensor)
    data = _by_head(value.data, n_pos)
    return _from_values(data, output.data) if data is not None else None


def _is_copy(value: Value, origin: Value) -> bool:
    """`value` holds numbers of `origin`, moved about but not computed with."""
    return any(v is origin for v in moved_from(value))


def moved_from(value: Value) -> list[Value]:
    """`value` and everything it is an untouched copy or view of, nearest first."""
    chain = [value]
    while (step := chain[-1].producer) is not None and step.name in MOVES and step.inputs:
        chain.append(step.inputs[0][1])
    return chain


def heads_before_repeat(value: Value) -> int:
    """Heads of ``[batch, head, pos, d]`` (of one prompt) before they were repeated over their query groups."""
    repeats, chain = 1, moved_from(value)
    for after, before in pairwise(chain):
        if after.producer is not None and after.producer.name in ("repeat", "repeat_interleave"):
            repeats = max(repeats, after.tensor.numel() // before.tensor.numel())
        sizes = zip(after.shape, after.tensor.stride(), strict=True)
        repeats = max(repeats, prod(size for size, stride in sizes if stride == 0))
    return value.shape[-3] // repeats


MOVES = frozenset(
    "view reshape flatten unflatten transpose permute movedim swapaxes swapdims contiguous clone split chunk "
    "tensor_split unbind narrow select __getitem__ squeeze unsqueeze expand expand_as repeat_interleave repeat "
    "view_as broadcast_to __get__".split()
)


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
    steps: Tensor = torch.arange(n_heads)[:, None] * heads.stride(1) + torch.arange(width) * heads.stride(2)
    index: Tensor = steps + int(start)
    return index if int(index.min()) >= 0 and int(index.max()) < output.shape[-1] else None


def _from_values(heads: Tensor, output: Tensor) -> Tensor | None:
    """Match every channel by its numbers over the positions, one hash per channel."""
    wanted, held = _hashes(heads.permute(1, 2, 0)), _hashes(output.reshape(-1, output.shape[-1]).T)
    ordered, order = held.sort()
    place = torch.searchsorted(ordered, wanted).clamp_max(len(ordered) - 1)
    return order[place] if torch.equal(ordered[place], wanted) else None


def _hashes(rows: Tensor) -> Tensor:
    """One integer per row of numbers (the last axis), equal where the bits are."""
    words = rows.contiguous().view(_WORDS[rows.element_size()]).long()
    factors = torch.arange(1, 2 * rows.shape[-1], 2, device=rows.device) * 0x9E3779B97F4A7C1
    return (words * factors).sum(-1)


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
