"""Sizes of one model: what its forward pass was seen to carry, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

Mixer = Literal["attention", "other"]
Channel = Literal["plain", "gated", "moe", "other"]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One block execution.

    Attributes:
        mixer: what mixes tokens; ``None`` where the block has no token mixer.
        channel: what mixes channels: a plain or gated MLP, a mixture of experts; ``None`` for none.
        parallel: attention and MLP both read the block's input, so there is no residual in between.
        qk_norm: the query and key pass through a norm.
    """

    mixer: Mixer | None = "attention"
    channel: Channel | None = "gated"
    parallel: bool = False
    qk_norm: bool = False
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    d_mlp: int | None = None
    n_experts: int | None = None
    experts_per_token: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes of one model. A size that differs between layers is ``None`` here; ``at(layer)`` has it.

    Attributes:
        n_layers: block executions in one forward.
        d_model: width of the residual stream.
        n_ctx: longest prompt, in tokens; ``None`` when the config states none.
        n_streams: parallel residual streams; 1 on an ordinary trunk.
    """

    n_layers: int
    d_model: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    d_mlp: int | None = None
    vocab_size: int | None = None
    n_ctx: int | None = None
    n_experts: int | None = None
    experts_per_token: int | None = None
    n_streams: int = 1
    layers: tuple[LayerFacts, ...] = field(default=(), repr=False)

    def at(self, layer: int | None) -> Facts:
        """The sizes one layer has; the model's own for a trunk-level point (``None``)."""
        if layer is None or not self.layers:
            return self
        own = self.layers[layer]
        return replace(self, layers=(), **{name: getattr(own, name) for name in _PER_LAYER})

    @classmethod
    def from_dict(cls, sizes: Mapping[str, Any]) -> Facts:
        """Facts from plain numbers, for work without a model: ``Facts.from_dict({"n_layers": 12, "n_heads": 12})``.

        Args:
            sizes: the fields of this class, where ``n_kv_heads`` is ``n_heads`` unless given and may also be spelled
                ``n_key_value_heads``, and ``head_dim`` ``d_head``. With a field of :class:`LayerFacts` that is no size,
                e.g. ``channel``, all layers are such; ``gated_mlp`` says ``channel`` with true and false. ``layers`` is
                a list with the fields of each layer instead, its sizes included.

        Raises:
            TypeError: a key that is no fact.
        """
        given: dict[str, Any] = {_SPELLINGS.get(name, name): size for name, size in sizes.items()}
        gated = given.pop("gated_mlp", None)
        if gated is not None:
            given["channel"] = "gated" if gated else "plain"
        structure = {name: given.pop(name) for name in _STRUCTURE if name in given}
        each: Sequence[Mapping[str, Any]] = given.pop("layers", ())
        layers = tuple(LayerFacts(**{_SPELLINGS.get(name, name): v for name, v in own.items()}) for own in each)
        if layers:
            given = {"n_layers": len(layers), **common(layers), **given}
        elif given.get("n_kv_heads") is None:
            given["n_kv_heads"] = given.get("n_heads")
        if structure:
            own = {name: given[name] for name in _PER_LAYER if name in given}
            layers = (LayerFacts(**structure, **own),) * given["n_layers"]
        return cls(**given, layers=layers)

    def to_dict(self) -> dict[str, int]:
        """The sizes that are known, as plain numbers."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layers"}
        return {name: size for name, size in known.items() if size is not None}


_SPELLINGS = {"n_key_value_heads": "n_kv_heads", "d_head": "head_dim"}
_STRUCTURE = ("mixer", "channel", "parallel", "qk_norm")
_PER_LAYER = ("n_heads", "n_kv_heads", "head_dim", "d_mlp", "n_experts", "experts_per_token")


def common(layers: tuple[LayerFacts, ...]) -> dict[str, int | None]:
    """Every per-layer size on which all the layers that have it agree."""
    sizes: dict[str, int | None] = {}
    for name in _PER_LAYER:
        seen = {getattr(layer, name) for layer in layers} - {None}
        sizes[name] = seen.pop() if len(seen) == 1 else None
    return sizes
