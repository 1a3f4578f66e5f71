"""What a survey finds: the blocks of one forward in order, and where each of their points is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from locant.address import Address
from locant.anatomy.facts import Facts
from locant.anatomy.formula import Formula, Named
from locant.anatomy.sites import Channels, ModuleSite, Site


@dataclass(frozen=True, slots=True)
class Gate:
    """What the attention output is multiplied by: a function of some channels of a projection.

    Attributes:
        op: the function, by its name in ``torch``.
        channels: where in ``attn_gate`` its argument lies; ``None`` for all of it.
    """

    op: str
    channels: Channels | None


@dataclass(frozen=True, slots=True)
class Move:
    """One thing that happens to the residual on its way through a block.

    Attributes:
        kind: ``write`` adds a point to every stream of a stack, each with its weight; ``mix`` mixes the streams.
        name: the point (or the entry of ``Part.beside``) that is added or mixed with, the norm's path, or the name of
            the weight it is multiplied by, or that is added as a ``bias``.
        factor: the number it is multiplied by.
        since: the first of the streams it is added to.
    """

    kind: Literal["add", "norm", "scale", "weight", "bias", "mix", "write"]
    name: str = ""
    factor: float = 1.0
    since: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One place with a family of points: a block execution, or the trunk around the blocks.

    Attributes:
        sites: where each point is read, by point name.
        absent: why a point this part lacks is not there, one sentence each.
        modules: the paths of the weights the identities call by hand, by role.
        gate: how ``attn_gate`` gates ``z``, where it does.
        constants: numbers the forward pass has in its code, e.g. ``score_cap``.
        beside: tensors that are no points and that identities need: what else is added to the residual
            (``added.0``), what multiplies ``z`` where that is no gate (``z_factor``), and with what weights attention
            and MLP read a stack of streams (``attn_read``, ``mlp_read``).
        to_attn: what happens to ``resid_pre`` before the norm of attention reads it.
        continues: its input is what the block before it returned; false in a trunk that adds something between.
        to_mid: what makes ``resid_mid`` of ``resid_pre``; ``None`` where that could not be followed.
        formulas: how a point follows from those before it, where the forward computes it element by element:
            ``mlp_act`` (before any norm of it) from ``mlp_pre`` and ``mlp_pre_linear``, a contribution from the output.
        to_post: what makes ``resid_post`` of ``resid_mid``, or of ``resid_pre`` where there is no ``resid_mid``.
        lane: the stream that attention and MLP read and write as if it were the only one, once the streams are mixed;
            then ``to_mid`` and ``to_post`` say what makes ``resid_mid``, and the vector after it, of that stream.
        beyond: what else is added to the streams of such a block.
    """

    path: str
    call: int = 0
    sites: Mapping[str, Site] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    gate: Gate | None = None
    beside: Mapping[str, Site] = field(default_factory=dict)
    to_mid: tuple[Move, ...] | None = None
    to_post: tuple[Move, ...] | None = None
    lane: int | None = None
    beyond: tuple[Move, ...] = ()
    formulas: Mapping[str, Formula | Named] = field(default_factory=dict)
    to_attn: tuple[Move, ...] = ()
    continues: bool = True

    def aside(self, name: str) -> Address:
        """What a tensor of `beside` is kept under: no address that anyone can ask for."""
        return Address.of_module(f"{self.path or 'trunk'}.{self.call}.{name}")


@dataclass(frozen=True, slots=True)
class Entry:
    """How the first residual is made: the outputs of some embedding modules, added, scaled, and perhaps normed."""

    summands: tuple[str, ...] = ()
    scale: float = 1.0
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The structure of one loaded model.

    Attributes:
        blocks: one part per block execution, in the order they run.
        attention: the attention implementation the survey ran under; sites inside attention depend on it.
        outputs: every module that ran and gave a tensor: where its output is read, and how often it ran.
        logit_ops: what happens to the unembedding's output before it is the logits, in order.
        entry: how the first residual follows from the embeddings.
    """

    facts: Facts
    trunk: Part
    blocks: tuple[Part, ...]
    attention: str | None = None
    entry: Entry = Entry()
    outputs: Mapping[str, tuple[ModuleSite, int]] = field(default_factory=dict)
    logit_ops: tuple[tuple[str, float], ...] = ()

    def part(self, layer: int | None) -> Part:
        return self.trunk if layer is None else self.blocks[layer]

    def site(self, address: Address) -> Site | None:
        site = self.part(address.layer).sites.get(address.name)
        if site is None or address.stream is None:
            return site
        return replace(site, view=replace(site.view, stream=address.stream))

    def addresses(self) -> Iterator[Address]:
        """Every point that was found, in forward order."""
        for layer in (None, *range(len(self.blocks))):
            for name in self.part(layer).sites:
                yield Address(name, layer)

    def extras(self) -> Iterator[tuple[Address, Site]]:
        """What the proof reads besides the points: other summands of the residual, and the embeddings' modules."""
        for part in (self.trunk, *self.blocks):
            for name, site in part.beside.items():
                yield part.aside(name), site
        for path in self.entry.summands:
            if path in self.outputs:
                yield Address.of_module(path), self.outputs[path][0]

    def shape_logits(self, unembedded: Tensor) -> Tensor:
        """What the model makes of its unembedding's output: the family's scaling and soft-cap."""
        for op, constant in self.logit_ops:
            unembedded = _LOGIT_OPS[op](unembedded, constant)
        return unembedded


_LOGIT_OPS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "mul": lambda x, c: x * c,
    "div": lambda x, c: x / c,
    "tanh": lambda x, _: x.tanh(),
}
