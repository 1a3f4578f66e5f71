"""What the edits of one call do to the tensors of one forward: every shape and index checked before it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from locant.address import Address, format_address
from locant.anatomy.sites import wide
from locant.anatomy.written import MASKED
from locant.engine.cache import Layout, resolve_positions
from locant.engine.edits import Edit, Operation
from locant.engine.prompts import Batch
from locant.errors import EditError


@dataclass(frozen=True, slots=True)
class Target:
    """What is known of an edited tensor before the forward.

    Attributes:
        width: numbers in its last axis, heads included; ``None`` where the prompt decides it, or only the module knows.
        stacked: ``[batch, pos, stream, width]``.
    """

    layout: Layout
    width: int | None
    stacked: bool = False


class Changes:
    """The edits of one call, each resolved on the batch; called with a point's tensor it gives the changed one.

    Args:
        special: the ids an edit may have to leave alone.

    Raises:
        EditError, PromptError: an edit that does not fit its point, or names prompts or positions there are not.
    """

    def __init__(
        self, edits: Sequence[Edit], targets: Mapping[Address, Target], batch: Batch, special: Collection[int]
    ) -> None:
        self._changes: dict[Address, list[_Change]] = {}
        for edit in edits:
            place = _Place(edit, targets[edit.address], batch, special)
            self._changes.setdefault(edit.address, []).append(_Change(edit.operation, place))

    def __call__(self, address: Address, value: Tensor) -> Tensor:
        for change in self._changes[address]:
            value = change(value)
        return value


class _Place:
    """Where on one batch an edit applies."""

    def __init__(self, edit: Edit, target: Target, batch: Batch, special: Collection[int]) -> None:
        self.name = format_address(edit.address)
        self.scores = edit.address.name == "attn_scores"
        self.target = target
        self.batch = batch
        where = edit.where
        self.prompts = _indices(self.name, "prompt", where.prompts, len(batch))
        lengths = [batch.lengths[i] for i in self.prompts]
        self.rows = None if where.positions is None else resolve_positions(_listed(where.positions), lengths)
        mask = torch.zeros(len(batch), batch.longest, dtype=torch.bool)
        for n, i in enumerate(self.prompts):
            mask[i, range(batch.lengths[i]) if self.rows is None else self.rows[n]] = True
            if where.except_positions is not None:
                mask[i, resolve_positions(_listed(where.except_positions), [lengths[n]])[0]] = False
            if not where.special_tokens:
                mask[i, [p for p, token in enumerate(batch.tokens[i]) if token in special]] = False
        self.mask = None if bool(mask.all()) else mask
        self.heads, self.columns = self._columns(edit)
        self.keys = None if where.keys is None else self._keys(where.keys)

    @property
    def width(self) -> int | None:
        return self.target.width if self.columns is None else len(self.columns)

    def _columns(self, edit: Edit) -> tuple[list[int] | None, list[int] | None]:
        where, layout, width = edit.where, self.target.layout, self.target.width
        if where.heads is not None and layout.heads is None:
            raise EditError(f"{self.name}: heads", has="its last axis holds no heads", instead="leave heads out")
        if layout.matrix:
            if where.neurons is not None:
                raise EditError(f"{self.name}: neurons", has="it is a matrix of queries and keys")
            return _indices(self.name, "head", where.heads, layout.heads or 1), None
        if where.heads is None and where.neurons is None:
            return None, None
        if width is None:
            raise EditError(f"{self.name}: neurons", has="the width of a module's output is known only when it runs")
        n_heads = layout.heads or 1
        each = width // n_heads
        heads = _indices(self.name, "head", where.heads, n_heads)
        neurons = _indices(self.name, "neuron", where.neurons, each)
        return None, [head * each + neuron for head in heads for neuron in neurons]

    def _keys(self, keys: int | Sequence[int]) -> Tensor:
        if not self.target.layout.matrix:
            raise EditError(f"{self.name}: keys", has="only attn_scores and attn_probs have an axis of keys")
        mask = torch.zeros(len(self.batch), 1, 1, self.batch.longest, dtype=torch.bool)
        for i in self.prompts:
            mask[i, ..., resolve_positions(_listed(keys), [self.batch.lengths[i]])[0]] = True
        return mask

    def fitted(self, kind: str, tensor: Tensor, rest: float) -> Tensor:
        """A tensor of an operation, ``[width]`` or one vector for each position, `rest` where it says nothing.

        Raises:
            EditError: it has another shape, or numbers that are not finite where they are used.
        """
        what = f"{self.name}: {kind}"
        if self.target.layout.matrix:
            return self._of_matrix(what, tensor, rest)
        if tensor.dim() == 0 or (tensor.dim() == 1 and self.width in (None, tensor.shape[0])):
            _check_finite(what, tensor)
            return tensor
        n_pos = self.batch.longest if self.rows is None else len(self.rows[0])
        shape = (len(self.prompts), n_pos, self.width)
        fits = tensor.dim() == 3 and all(
            n == m or (m == 1 and axis < 2) for axis, (n, m) in enumerate(zip(shape, tensor.shape, strict=True))
        )
        if not fits:
            raise EditError(
                f"{what} has shape {tuple(tensor.shape)}",
                has=f"what is edited is [{self.width}] at each of {len(self.prompts)} prompts and {n_pos} positions",
                instead=f"pass [{self.width}], or [prompts, positions, {self.width}] with 1 for all of them",
            )
        whole = tensor.new_full((len(self.batch), self.batch.longest, tensor.shape[-1]), rest)
        for n, i in enumerate(self.prompts):
            vectors = tensor[n if tensor.shape[0] > 1 else 0]
            whole[i, slice(None) if self.rows is None else self.rows[n]] = vectors
        _check_finite(what, whole if self.mask is None else whole[self.mask.to(whole.device)])
        if self.mask is not None:  # another run's padding is no number
            whole = torch.where(self.mask.to(whole.device)[..., None], whole, torch.full_like(whole, rest))
        return whole.unsqueeze(-2) if self.target.stacked else whole

    def _of_matrix(self, what: str, tensor: Tensor, rest: float) -> Tensor:
        if tensor.dim() == 0:
            _check_finite(what, tensor)
            return tensor
        n, longest, heads = len(self.prompts), self.batch.longest, self.heads or []
        shapes = {(m, len(heads), longest, longest) for m in (1, n)}
        if tuple(tensor.shape) not in shapes:
            raise EditError(
                f"{what} has shape {tuple(tensor.shape)}",
                has=f"what is edited is [prompts, heads, queries, keys], {(n, len(heads), longest, longest)}",
                instead="pass a number, or that many",
            )
        whole = tensor.new_full((len(self.batch), *tensor.shape[1:]), rest)
        whole[self.prompts] = tensor.expand(n, *tensor.shape[1:])
        used = whole[self.of_matrix(whole)]
        _check_finite(what, used)
        return torch.where(self.of_matrix(whole), whole, torch.full_like(whole, rest))

    def of_matrix(self, value: Tensor) -> Tensor:
        """``[batch, head, query, key]``: the entries to change; a token that is not seen stays so."""
        n_query, n_key = value.shape[-2:]
        seen = torch.ones(n_query, n_key, dtype=torch.bool, device=value.device).tril()
        mask = (seen & self.batch.mask(value.device)[:, None, None, :]).expand(value.shape)
        for chosen in (None if self.mask is None else self.mask[:, None, :, None], self.keys):
            mask = mask if chosen is None else mask & chosen.to(value.device)
        return mask


@dataclass(slots=True)
class _Change:
    """One operation at one place."""

    operation: Operation
    place: _Place
    _ready: Callable[[Tensor], Tensor] | None = field(default=None, init=False)
    _mask: Tensor | None = field(default=None, init=False)
    _columns: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.place.target.layout.matrix and not self.operation.elementwise:
            raise EditError(
                f"{self.place.name}: {type(self.operation).__name__}",
                has="an attention matrix has no vector with a direction or a length",
                instead="edit z or value, or pass Add, Set or Apply",
            )
        rest = dict.fromkeys(self.operation.directions, 1.0)
        fitted = {
            name: self.place.fitted(f"{type(self.operation).__name__} {name}", wide(tensor), rest.get(name, 0.0))
            for name, tensor in self.operation.tensors().items()
        }
        self.operation = self.operation.placed(lambda name, _: fitted[name])

    def __call__(self, value: Tensor) -> Tensor:
        x, place = wide(value), self.place
        if self._ready is None:
            self._ready = self.operation.placed(lambda _, tensor: tensor.to(x.device, x.dtype))
            self._columns = None if place.columns is None else torch.tensor(place.columns, device=x.device)
            self._mask = None if place.mask is None else place.mask.to(x.device)
        if place.target.layout.matrix:
            return self._in_matrix(x, self._ready).to(value.dtype)
        self._check_width(x)
        chosen = x if self._columns is None else x[..., self._columns]
        new = self._ready(chosen)
        if self._mask is not None:
            mask = self._mask.reshape(*self._mask.shape, *[1] * (chosen.dim() - 2))
            new = torch.where(mask, new, chosen)
        return (new if self._columns is None else x.index_copy(-1, self._columns, new)).to(value.dtype)

    def _in_matrix(self, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        heads = torch.tensor(self.place.heads, device=x.device)
        chosen = x[:, heads]
        mask = self.place.of_matrix(chosen)
        if self.place.scores:
            mask = mask & (chosen > MASKED)
        return x.index_copy(1, heads, torch.where(mask, operation(chosen), chosen))

    def _check_width(self, x: Tensor) -> None:
        """A module's output shows its width only now."""
        if self.place.target.width is not None:
            return
        for name, tensor in self.operation.tensors().items():
            if tensor.dim() and tensor.shape[-1] != x.shape[-1]:
                raise EditError(
                    f"{self.place.name}: {name} is {tensor.shape[-1]} wide", has=f"it is {x.shape[-1]} wide"
                )


def _listed(positions: int | Sequence[int]) -> Sequence[int]:
    return [positions] if isinstance(positions, int) else list(positions)


def _indices(name: str, kind: str, chosen: int | Sequence[int] | None, n: int) -> list[int]:
    """What `chosen` names of `n`, all by default; a negative index counts from the end."""
    if chosen is None:
        return list(range(n))
    listed = _listed(chosen)
    wrong = next((i for i in listed if not isinstance(i, int) or isinstance(i, bool) or not -n <= i < n), None)
    if wrong is not None or not listed:
        raise EditError(f"{name}: {kind} {wrong if listed else listed}", has=f"there are {n}, 0 to {n - 1}")
    if len({i % n for i in listed}) < len(listed):
        raise EditError(f"{name}: {kind}s {listed} name one twice")
    return [i % n for i in listed]


def _check_finite(what: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise EditError(f"{what} holds NaN or infinity", instead="pass finite numbers")
