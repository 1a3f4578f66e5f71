"""Cache: the tensors one capture read, by address, with everything needed to know what they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from locant.address import Address, format_address, to_address
from locant.errors import AddressError, CacheError, PromptError, did_you_mean

Key = Address | str | tuple[Any, ...]
_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a capture came from.

    Attributes:
        model: hub id, path or class of the model; `revision` is the hub's commit where there is one.
        dtype, attention: how the model ran.
        versions: of locant, torch and transformers.
        proofs: for each address what its proof said, e.g. ``"proven (3e-07)"``.
        token_strings: one string per token of each prompt, where there was a tokenizer.
    """

    model: str = ""
    revision: str | None = None
    dtype: str = ""
    attention: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    proofs: Mapping[str, str] = field(default_factory=dict)
    token_strings: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """What the axes of one captured tensor are.

    Attributes:
        position_axis: 1, 2 for the query axis of an attention matrix, ``None`` for a module's output that
            has none or where one position was dropped.
        heads: the heads its last axis holds (its second, of a matrix), where it holds heads.
        matrix: ``[batch, head, query, key]``.
    """

    position_axis: int | None = 1
    heads: int | None = None
    matrix: bool = False

    def dropped(self) -> Layout:
        """The layout once a single position was taken."""
        return replace(self, position_axis=None)


class Cache(Mapping[Address, Tensor]):
    """Captured tensors, ``[batch, pos, ...]`` each, right-padded to the longest prompt.

    A key is an :class:`Address`, its string, or a ``(name, layer)`` tuple. Attention scores and probabilities
    are ``[batch, head, query, key]``. Positions past a prompt's end hold NaN (-1 in integer tensors), so that a
    mean over padding cannot pass for a number; :meth:`prompt` has no padding.

    Attributes:
        tokens: the ids of each prompt as the model read them.
        positions: for each prompt the absolute positions its rows hold; ``None`` when they hold them all.
        origin: the model, its versions and proofs.
    """

    def __init__(
        self,
        tensors: Mapping[Address, Tensor],
        tokens: Sequence[Sequence[int]],
        layouts: Mapping[Address, Layout] | None = None,
        positions: Sequence[Sequence[int]] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self._layouts = {a: (layouts or {}).get(a, Layout()) for a in self._tensors}
        self.tokens = tuple(tuple(ids) for ids in tokens)
        self.positions = None if positions is None else tuple(tuple(p) for p in positions)
        self.origin = origin or Origin()

    # ---- a mapping

    def __getitem__(self, key: Key) -> Shaped[Tensor, ...]:
        return self._tensors[self._address(key)]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, key: object) -> bool:
        try:
            return to_address(key) in self._tensors  # type: ignore[arg-type]
        except AddressError:
            return False

    # ---- what it knows

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(len(ids) for ids in self.tokens)

    @property
    def mask(self) -> Shaped[Tensor, "batch pos"]:
        """``[batch, pos]``, true at a prompt's own tokens."""
        if self.positions is not None:
            return torch.ones(len(self.positions), len(self.positions[0]), dtype=torch.bool)
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes held, memory shared by several addresses counted once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors.values()}
        return sum(storages.values())

    # ---- parts of it

    def prompt(self, index: int) -> Cache:
        """The cache of one prompt: ``[1, pos, ...]`` tensors without padding; views, not copies."""
        count = len(self.tokens)
        if not -count <= index < count:
            raise CacheError(f"prompt {index} of this cache", has=f"it holds {count} prompts")
        index %= count
        tensors = {a: self._cut(a, t, index) for a, t in self._tensors.items()}
        positions = None if self.positions is None else [self.positions[index]]
        strings = self.origin.token_strings[index : index + 1]
        origin = replace(self.origin, token_strings=strings)
        return Cache(tensors, [self.tokens[index]], self._layouts, positions, origin)

    def only(self, addresses: Sequence[Key]) -> Cache:
        """The same cache with some of its addresses."""
        tensors = {a: self._tensors[a] for a in map(self._address, addresses)}
        return Cache(tensors, self.tokens, self._layouts, self.positions, self.origin)

    def _cut(self, address: Address, tensor: Tensor, index: int) -> Tensor:
        layout = self._layouts[address]
        if layout.position_axis is None and tensor.shape[0] != len(self.tokens):
            return tensor
        row = tensor[index : index + 1]
        length = self.lengths[index]
        if layout.matrix:
            row = row[..., :length]
        if self.positions is None and layout.position_axis is not None:
            row = row.narrow(layout.position_axis, 0, length)
        return row

    def per_head(self, key: Key) -> Shaped[Tensor, "batch pos head d_head"]:
        """``[batch, pos, head, d_head]`` of a point whose last axis holds heads; a view.

        Raises:
            CacheError: the address was not captured, or its tensor has no heads.
        """
        address = self._address(key)
        heads = self._layouts[address].heads
        if heads is None or self._layouts[address].matrix:
            having = [format_address(a) for a, v in self._layouts.items() if v.heads and not v.matrix]
            raise CacheError(
                f"{format_address(address)} per head: its last axis holds no heads",
                has=f"captured with heads: {', '.join(having[:6]) or 'none'}",
            )
        tensor = self._tensors[address]
        return tensor.unflatten(-1, (heads, -1))

    def at(self, positions: int | Sequence[int]) -> Cache:
        """The same addresses at some positions only, copied, so that the rest can be freed.

        A negative position counts from the end of each prompt. One position as an ``int`` drops the axis.
        """
        if self.positions is not None:
            raise CacheError("positions of a cache that already holds selected ones", instead="capture them all")
        rows = resolve_positions(positions, self.lengths)
        drop = isinstance(positions, int)
        tensors = {a: select(t, rows, self._layouts[a].position_axis, drop).clone() for a, t in self._tensors.items()}
        layouts = {a: v.dropped() if drop else v for a, v in self._layouts.items()}
        return Cache(tensors, self.tokens, layouts, rows, self.origin)

    # ---- on disk

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, its metadata included, whole or not at all. Returns the path.

        Raises:
            CacheError: the file cannot be written there.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        stored: dict[str, Tensor] = {}
        first: dict[tuple[Any, ...], str] = {}
        same: dict[str, str] = {}
        for address, tensor in self._tensors.items():
            name = format_address(address)
            identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if identity in first:
                same[name] = first[identity]
                continue
            first[identity] = name
            stored[name] = tensor.detach().contiguous().cpu()
            if stored[name].untyped_storage().nbytes() != stored[name].nbytes or stored[name] is tensor:
                stored[name] = stored[name].clone()
        about = {
            "format": _FORMAT,
            "order": [format_address(a) for a in self._tensors],
            "same": same,
            "tokens": self.tokens,
            "positions": self.positions,
            "layouts": {format_address(a): asdict(v) for a, v in self._layouts.items()},
            "origin": asdict(self.origin),
        }
        target = Path(path).expanduser()
        if not target.name or target.is_dir() or (target.exists() and not target.is_file()):
            raise CacheError(f"{str(path)!r} names no file that can be written")
        unfinished = target.with_name(f".{target.name[:100]}.unfinished")
        try:
            save_file(stored, unfinished, metadata={"locant": json.dumps(about)})
            unfinished.replace(target)
        except (SafetensorError, OSError) as error:
            raise CacheError(f"{path} cannot be written: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)
        return target

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> Cache:
        """Read a file that :meth:`save` wrote.

        Raises:
            CacheError: the file is not there or is no capture.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt", device=device) as file:
                text = (file.metadata() or {}).get("locant")
                if text is None:
                    raise CacheError(f"{path}: a safetensors file without a capture's metadata")
                about = json.loads(text)
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["format"] != _FORMAT:
                raise CacheError(f"{path} is a capture of format {about['format']!r}", has=f"this reads {_FORMAT!r}")
            tensors = {to_address(n): stored[about["same"].get(n, n)] for n in about["order"]}
            layouts = {to_address(n): Layout(**v) for n, v in about["layouts"].items()}
            origin = about["origin"] | {"token_strings": tuple(map(tuple, about["origin"]["token_strings"]))}
            return cls(tensors, about["tokens"], layouts, about["positions"], Origin(**origin))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            if isinstance(error, CacheError):
                raise
            raise CacheError(f"{path} cannot be read as a capture: {error}") from error

    # ---- looking at it

    def __repr__(self) -> str:
        rows = [("point", "layers", "shape", "dtype", "bytes")]
        for name, layers in self._by_point().items():
            first = self._tensors[layers[0]]
            size = sum(self._tensors[a].nbytes for a in layers)
            shapes = {tuple(self._tensors[a].shape) for a in layers}
            shape = "×".join(map(str, first.shape)) if len(shapes) == 1 else "differs"
            spans = spans_of([a.layer for a in layers if a.layer is not None])
            rows.append((name, spans, shape, str(first.dtype).removeprefix("torch."), bytes_text(size)))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        prompts = f"{len(self.tokens)} prompt{'s' * (len(self.tokens) != 1)} of {spans_of(list(self.lengths))} tokens"
        source = f" from {self.origin.model}" if self.origin.model else ""
        return "\n".join([f"Cache: {prompts}{source}, {bytes_text(self.nbytes)}", *lines])

    def _by_point(self) -> dict[str, list[Address]]:
        grouped: dict[str, list[Address]] = {}
        for address in self._tensors:
            grouped.setdefault(address.name, []).append(address)
        return grouped

    def _address(self, key: Key) -> Address:
        address = to_address(key)  # type: ignore[arg-type]
        if address not in self._tensors:
            names = [format_address(a) for a in self._tensors]
            raise CacheError(
                f"{format_address(address)} was not captured",
                has=f"this cache holds {', '.join(names[:8])}{' …' if len(names) > 8 else ''}",
                instead=did_you_mean(format_address(address), names),
            )
        return address


def resolve_positions(positions: int | Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Absolute positions for each prompt; a negative one counts from that prompt's own end.

    Raises:
        PromptError: a position some prompt does not have, or none at all.
    """
    wanted = list(positions) if isinstance(positions, Sequence) else [positions]
    if not wanted or any(not isinstance(p, int) or isinstance(p, bool) for p in wanted):
        raise PromptError(f"positions {positions!r}", instead="name one position, or a list of them, as integers")
    for i, length in enumerate(lengths):
        missing = next((p for p in wanted if not -length <= p < length), None)
        if missing is not None:
            raise PromptError(
                f"position {missing} of prompt {i}", has=f"that prompt has {length} tokens, 0 to {length - 1}"
            )
    return [[p % length for p in wanted] for length in lengths]


def select(tensor: Tensor, rows: Sequence[Sequence[int]], axis: int | None, drop: bool) -> Tensor:
    """The given positions of each prompt, copied; along `axis`, which is dropped if `drop`."""
    if axis is None:
        return tensor
    index = torch.tensor(rows, device=tensor.device)
    batch = torch.arange(len(rows), device=tensor.device)[:, None]
    moved = tensor.movedim(axis, 1)[batch, index]
    return moved[:, 0] if drop else moved.movedim(1, axis)


def spans_of(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    if not numbers:
        return "-"
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def bytes_text(count: float) -> str:
    """A byte count for people."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
