"""Where a point is read: a module boundary, or one operation inside a module, and how it is laid out there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Slot = int | str | None
Layout = Literal[
    "tokens", "shared", "flat", "heads", "heads_first", "keys", "matrix", "raw", "streams_first", "streams_flat"
]


@dataclass(frozen=True, slots=True)
class Channels:
    """Which channels of a fused projection hold one tensor, as ``groups`` runs of ``width`` every ``stride``."""

    start: int
    width: int
    stride: int
    groups: int = 1

    @classmethod
    def of(cls, index: Sequence[int]) -> Channels | None:
        """The layout of the channels `index`, or ``None`` if they are not equal runs, evenly spaced."""
        breaks = [i for i in range(1, len(index)) if index[i] != index[i - 1] + 1]
        starts = [index[i] for i in (0, *breaks)]
        widths = {b - a for a, b in pairwise((0, *breaks, len(index)))}
        strides = {b - a for a, b in pairwise(starts)}
        if len(widths) > 1 or len(strides) > 1 or (strides and min(strides) < max(widths)):
            return None
        width = widths.pop()
        return cls(starts[0], width, strides.pop() if strides else width, len(starts))

    @property
    def size(self) -> int:
        return self.width * self.groups

    def read(self, tensor: Tensor) -> Tensor:
        """``[..., width of the projection]`` to ``[..., size]``; a view where one run holds it all."""
        if self.groups == 1:
            return tensor[..., self.start : self.start + self.width]
        end = self.start + self.stride * (self.groups - 1) + self.width
        return tensor[..., self.start : end].unfold(-1, self.width, self.stride).flatten(-2)

    def write(self, tensor: Tensor, value: Tensor) -> Tensor:
        """A copy of the projection with `value`, ``[..., size]``, in its channels."""
        written = tensor.clone()
        for group in range(self.groups):
            start = self.start + group * self.stride
            written[..., start : start + self.width] = value[..., group * self.width : (group + 1) * self.width]
        return written


@dataclass(frozen=True, slots=True)
class View:
    """How the tensor at a site becomes the point's tensor.

    Attributes:
        layout: ``tokens`` ``[batch, pos, ...]``; ``shared`` ``[pos, ...]``, the same for every
            prompt; ``flat`` ``[batch * pos, ...]``; ``heads``
            ``[batch, pos, head, d]``; ``heads_first`` ``[batch, head, pos, d]``; ``keys``
            ``[batch, head, d, pos]``; ``matrix`` ``[batch, head, query, key]``; ``raw`` whatever a module gives
            that has no position axis; ``streams_first`` ``[stream, batch, pos, d]``; ``streams_flat``
            ``[batch, pos, stream * d]``.
        channels: the slice of a fused projection.
        n_heads: heads the point has; a key or value repeated over its query group is read once.
        scale: the family's residual multiplier.
        sinks: columns of a matrix behind the keys, which no token stands for.
        streams: residual streams in the tensor; read as ``[batch, pos, stream, d]`` where there are several.
        diagonal: what is added to the diagonal of a matrix ``[batch, pos, stream, stream]``, in float32 or wider.
        stream: the one of them that is read, ``[batch, pos, d]``; ``None`` for all.
    """

    layout: Layout = "tokens"
    channels: Channels | None = None
    n_heads: int | None = None
    scale: float = 1.0
    sinks: int = 0
    streams: int = 1
    stream: int | None = None
    diagonal: float = 0.0

    def read(self, tensor: Tensor, batch: int) -> Tensor:
        """The point's ``[batch, pos, width]`` (``[batch, head, query, key]`` for a matrix) in `tensor`."""
        if self.layout == "raw":
            return tensor
        if self.streams > 1:
            return self._read_streams(tensor)
        if self.diagonal:
            tensor = wide(tensor) + self.diagonal * torch.eye(tensor.shape[-1], device=tensor.device)
        if self.layout == "shared":
            return tensor.expand(batch, *tensor.shape)
        if self.layout in ("heads_first", "keys", "matrix") and tensor.dim() == 3:
            tensor = tensor.unflatten(0, (batch, -1))  # heads folded into the batch
        if self.layout == "matrix":
            return tensor[..., : -self.sinks] if self.sinks else tensor
        if self.layout == "tokens" and tensor.shape[0] == 1 != batch:
            tensor = tensor.expand(batch, *tensor.shape[1:])  # shared by all prompts, as a position embedding is
        if self.layout == "flat":
            tensor = tensor.reshape(batch, -1, *tensor.shape[1:])
        elif self.layout == "heads":
            tensor = tensor.flatten(-2)
        elif self.layout in ("heads_first", "keys"):
            tensor = self._merge_heads(tensor)
        if self.channels is not None:
            tensor = self.channels.read(tensor).contiguous()
        return tensor if self.scale == 1.0 else tensor * self.scale

    def write(self, site: Tensor, value: Tensor) -> Tensor:
        """The tensor that belongs at the site for the point to be `value`: what :meth:`read` undoes."""
        if self.streams > 1:
            return self._write_streams(site, value)
        if self.diagonal:
            value = (value - self.diagonal * torch.eye(value.shape[-1], device=value.device)).to(site.dtype)
        if self.scale != 1.0:
            held = replace(self, scale=1.0).read(site, value.shape[0])
            value = held + (value - held * self.scale) / self.scale  # what is not changed keeps its bits
        if self.sinks:
            value = torch.cat([value, site[..., -self.sinks :].reshape(*value.shape[:-1], self.sinks)], -1)
        if self.channels is not None:
            return self.channels.write(site, value.reshape(*site.shape[:-1], -1))
        if self.layout in ("heads_first", "keys"):
            return self._split_heads(site, value)
        if self.layout in ("tokens", "shared") and value.numel() != site.numel():
            return value  # one for all prompts until now
        return value.reshape(site.shape)

    def _read_streams(self, tensor: Tensor) -> Tensor:
        if self.layout == "streams_first":
            tensor = tensor.movedim(0, 2)
        elif self.layout == "streams_flat":
            tensor = tensor.unflatten(-1, (self.streams, -1))
        return tensor if self.stream is None else tensor[..., self.stream, :]

    def _write_streams(self, site: Tensor, value: Tensor) -> Tensor:
        if self.stream is not None:
            whole = replace(self, stream=None).read(site, value.shape[0]).clone()
            whole[..., self.stream, :] = value
            value = whole
        return (value.movedim(2, 0) if self.layout == "streams_first" else value).reshape(site.shape)

    def _split_heads(self, site: Tensor, value: Tensor) -> Tensor:
        held = site.shape[1] if site.dim() == 4 else site.shape[0] // value.shape[0]
        n = self.n_heads or held
        value = value.unflatten(-1, (n, -1)).transpose(1, 2)
        if self.layout == "keys":
            value = value.transpose(-1, -2)
        if held > n:
            value = value.repeat_interleave(held // n, 1)
        return value.reshape(site.shape)

    def _merge_heads(self, tensor: Tensor) -> Tensor:
        if self.layout == "keys":
            tensor = tensor.transpose(-1, -2)
        n = self.n_heads or tensor.shape[1]
        if tensor.shape[1] > n:
            tensor = tensor[:, :: tensor.shape[1] // n]
        elif tensor.shape[1] < n:  # one query token, its heads packed as positions of their key head
            tensor = tensor.reshape(tensor.shape[0], n, -1, tensor.shape[-1])
        return tensor.transpose(1, 2).flatten(-2)


@dataclass(frozen=True, slots=True)
class ModuleSite:
    """The input or output of the `call`-th call of a module in one forward.

    Attributes:
        slot: which argument (position or keyword) or which element of the output; ``None`` is the bare output.
        overwritten: the model changes this tensor in place later, so that reading means copying.
        in_place: it is written into the tensor itself, since what else holds the tensor reads it there too.
    """

    path: str
    side: Literal["input", "output"]
    slot: Slot = None
    call: int = 0
    view: View = View()
    overwritten: bool = False
    in_place: bool = False

    def __str__(self) -> str:
        slot = "" if self.slot is None else f"[{self.slot!r}]"
        nth = f" (call {self.call})" if self.call else ""
        return f"{self.path}.{self.side}{slot}{nth}"


@dataclass(frozen=True, slots=True)
class OpSite:
    """The `nth` operation of one name inside a call of a module: what no module boundary holds.

    Attributes:
        after: the call of an inner module since whose end `nth` counts; by default since the call itself began.
            What runs inside other modules may depend on the tokens (experts do), and would shift the count.
        slot: an argument's position or keyword, ``None`` for the result, or ``scores``/``probs``: what a fused
            attention kernel computes from its arguments and never returns.
    """

    path: str
    op: str
    nth: int
    slot: Slot
    call: int = 0
    view: View = View()
    overwritten: bool = False
    after: tuple[str, int] | None = None

    def __str__(self) -> str:
        part = "result" if self.slot is None else self.slot if isinstance(self.slot, str) else f"argument {self.slot}"
        since = "" if self.after is None else f" after {self.after[0].removeprefix(f'{self.path}.')}"
        return f"{self.path}: {part} of {self.op} #{self.nth}{since}"


Site = ModuleSite | OpSite


def slot_of(value: object, slot: Slot) -> object:
    """The element of a module's output that `slot` names."""
    if slot is None:
        return value
    return value[slot]  # type: ignore[index]


def attention_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The scores a fused attention call would give its softmax, in float32 or wider, as the kernel computes them.

    Shapes: query ``[batch, head, q, d]``, key ``[batch, kv_head, k, d]``; result ``[batch, head, q, k]``.
    The meaning of the arguments is that of :func:`torch.nn.functional.scaled_dot_product_attention`; a masked
    entry is the dtype's lowest number.
    """
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (wide(query) * factor) @ wide(key).transpose(-1, -2)
    lowest = torch.finfo(scores.dtype).min
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill_(~seen, lowest)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, lowest)
    elif mask is not None:
        scores = (scores + wide(mask)).clamp_(min=lowest)
    return scores


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype where that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
