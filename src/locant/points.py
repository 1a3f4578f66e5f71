"""POINTS: one row per named tensor of a forward pass. Everything else about points is derived from it.

The rows stand in the order in which a forward pass computes them. A row says what a point *is*; where it
lives on one model is found on that model, and whether it is served there is proven on its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Literal

from locant.errors import UnknownPoint, did_you_mean

Scope = Literal["trunk", "block"]
Value = Literal["float", "integer"]
Requirement = Literal[
    "always",
    "sequential_block",
    "attention",
    "qk_norm",
    "gated_attention",
    "mlp",
    "gated_mlp",
    "moe",
    "streams",
    "final_norm",
    "unembedding",
]

REQUIREMENTS: Mapping[Requirement, str] = MappingProxyType(
    {
        "always": "any trunk",
        "sequential_block": "a block whose MLP reads the residual that its attention has already written",
        "attention": "a token mixer with attention heads",
        "qk_norm": "attention that normalises its queries and keys",
        "gated_attention": "attention with an output gate",
        "mlp": "a channel mixer with neurons of its own, not experts",
        "gated_mlp": "an MLP with a gate branch and a linear branch",
        "moe": "a channel mixer that routes tokens to experts",
        "streams": "a trunk with several residual streams",
        "final_norm": "a norm after the last block",
        "unembedding": "a language-modelling head",
    }
)
"""What a model or a block must have for a point to exist there, as a phrase for people."""

PROMPT_AXES = frozenset({"query", "key"})
"""The factors of a width that the prompt decides rather than the model."""


@dataclass(frozen=True, slots=True)
class Service:
    """Whether one backend can serve a point at all, on a model that has it.

    Attributes:
        kind: ``hook`` (read where it is computed), ``recompute`` (rebuilt from other tensors),
            ``unimplemented`` (within reach, not wired up) or ``unreachable`` (a fused kernel consumes it).
        reason: one sentence for the last two, empty for the first two.
    """

    kind: Literal["hook", "recompute", "unimplemented", "unreachable"]
    reason: str = ""

    @property
    def served(self) -> bool:
        """Whether the backend serves the point."""
        return self.kind in ("hook", "recompute")


@dataclass(frozen=True, slots=True)
class Point:
    """One named tensor of a forward pass.

    Attributes:
        name: how it is written.
        meaning: one sentence.
        scope: ``trunk`` (one tensor per forward, no layer) or ``block`` (one per layer).
        axes: the axes of the tensor after ``batch``, named as locators name them; ``stream`` and ``expert``
            are the two that locators lack, ``head, neuron`` may be stored as one flat axis.
        width: the factors whose product is what the last axis counts, heads included: names of facts, or
            ``query`` and ``key`` where the prompt decides.
        needs: what the model or the block must have.
        value: ``float`` or ``integer``.
        read_only: why it cannot be written, or None where it can be.
        proof: the identities that must hold on a model before the point is served there.
        eager, vllm: what each backend can do with it.
        takes_stream: whether the coordinate ``stream`` may pick one stream of it.
    """

    name: str
    meaning: str
    scope: Scope
    axes: tuple[str, ...]
    width: tuple[str, ...]
    needs: Requirement
    value: Value
    read_only: str | None
    proof: tuple[str, ...]
    eager: Service
    vllm: Service
    takes_stream: bool = False

    @property
    def width_text(self) -> str:
        """The width as a formula, e.g. ``n_heads * head_dim``."""
        return " * ".join(self.width)

    def width_of(self, facts: object) -> int | None:
        """The width on one model.

        Args:
            facts: anything with the sizes as attributes, usually ``model.facts``.

        Returns:
            The number, or None where the prompt decides it or this model has no such size.
        """
        if PROMPT_AXES.intersection(self.width):
            return None
        sizes = [getattr(facts, factor, None) for factor in self.width]
        known = [size for size in sizes if isinstance(size, int)]
        return prod(known) if len(known) == len(sizes) else None


_HOOK = Service("hook")
_RECOMPUTE = Service("recompute")
_FUSED_BRANCHES = Service(
    "unreachable",
    "vLLM computes both MLP branches in one fused gate_up_proj, so neither of them leaves a module.",
)
_FUSED_EXPERTS = Service(
    "unreachable",
    "vLLM picks the experts inside its fused MoE kernel, which returns only their combined output.",
)

_RESIDUAL = ("position", "neuron")
_PER_HEAD = ("position", "head", "neuron")
_PATTERN = ("head", "dest_pos", "src_pos")
_COEFFICIENT = "it is a coefficient of the residual streams, not an activation"


def _trunk(
    name: str,
    meaning: str,
    width: tuple[str, ...],
    needs: Requirement,
    proof: tuple[str, ...],
    *,
    vllm: Service = _HOOK,
) -> Point:
    return Point(name, meaning, "trunk", _RESIDUAL, width, needs, "float", None, proof, _HOOK, vllm)


def _block(
    name: str,
    meaning: str,
    axes: tuple[str, ...],
    width: tuple[str, ...],
    needs: Requirement,
    proof: tuple[str, ...],
    *,
    value: Value = "float",
    read_only: str | None = None,
    vllm: Service = _HOOK,
    takes_stream: bool = False,
) -> Point:
    return Point(
        name, meaning, "block", axes, width, needs, value, read_only, proof, _HOOK, vllm, takes_stream
    )


_MODEL = ("d_model",)
_HEADS = ("n_heads", "head_dim")
_KV_HEADS = ("n_kv_heads", "head_dim")
_NEURONS = ("d_mlp",)
_MATRIX = ("n_heads", "query", "key")
_STREAMS = ("n_streams",)

_ROWS = (
    _trunk(
        "embeddings",
        "The embedding module's output, scaled where that module scales.",
        _MODEL,
        "always",
        ("embedding", "first_residual"),
    ),
    _block(
        "resid_pre",
        "The residual entering the block.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("chain",),
        takes_stream=True,
    ),
    _block(
        "attn_stream_collapse",
        "The one vector that attention reads from the residual streams, before its norm.",
        _RESIDUAL,
        _MODEL,
        "streams",
        ("stream_update",),
    ),
    _block(
        "attn_in",
        "What the token mixer was handed, after the norm before it where there is one.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("attn_input",),
    ),
    _block(
        "query",
        "The query projection per head, before any norm and before position encoding.",
        _PER_HEAD,
        _HEADS,
        "attention",
        ("projection", "rotation"),
    ),
    _block(
        "key",
        "The key projection per head, before any norm and before position encoding.",
        _PER_HEAD,
        _KV_HEADS,
        "attention",
        ("projection", "rotation"),
    ),
    _block(
        "value",
        "The value projection per head.",
        _PER_HEAD,
        _KV_HEADS,
        "attention",
        ("projection", "mixing"),
    ),
    _block(
        "attn_gate",
        "The raw projection that the output gate is taken from, as wide as the module makes it: twice the "
        "heads where query and gate share one.",
        _PER_HEAD,
        _HEADS,
        "gated_attention",
        ("gate",),
        vllm=Service(
            "unimplemented", "The projection is a module on vLLM's tree too, but no tap is wired to it yet."
        ),
    ),
    _block(
        "q_norm_in",
        "The query entering QK-norm.",
        _PER_HEAD,
        _HEADS,
        "qk_norm",
        ("projection", "qk_norm"),
    ),
    _block(
        "q_norm_out",
        "The query leaving QK-norm.",
        _PER_HEAD,
        _HEADS,
        "qk_norm",
        ("qk_norm", "rotation"),
    ),
    _block(
        "k_norm_in",
        "The key entering QK-norm.",
        _PER_HEAD,
        _KV_HEADS,
        "qk_norm",
        ("projection", "qk_norm"),
    ),
    _block(
        "k_norm_out",
        "The key leaving QK-norm.",
        _PER_HEAD,
        _KV_HEADS,
        "qk_norm",
        ("qk_norm", "rotation"),
    ),
    _block(
        "query_rotated",
        "The query that attention really multiplies, after norm and position encoding.",
        _PER_HEAD,
        _HEADS,
        "attention",
        ("scores",),
    ),
    _block(
        "key_rotated",
        "The key that attention really multiplies, after norm and position encoding.",
        _PER_HEAD,
        _KV_HEADS,
        "attention",
        ("scores",),
    ),
    _block(
        "attn_scores",
        "The query-key matrix as the softmax receives it: scaled, capped and masked, without sink columns.",
        _PATTERN,
        _MATRIX,
        "attention",
        ("scores", "softmax"),
        vllm=_RECOMPUTE,
    ),
    _block(
        "attn_probs",
        "The attention pattern: what each query position takes from each key position, never renormalised.",
        _PATTERN,
        _MATRIX,
        "attention",
        ("softmax", "mixing"),
        vllm=_RECOMPUTE,
    ),
    _block(
        "z",
        "Each head's output before W_O, after the output gate where there is one.",
        _PER_HEAD,
        _HEADS,
        "attention",
        ("mixing", "attn_output"),
    ),
    _block(
        "attn_out",
        "The token mixer's own output, before any norm after it.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("attn_output", "attn_contribution"),
    ),
    _block(
        "attn_out_post",
        "What attention adds to the residual, its post-norm and multiplier included.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("attn_contribution", "mid_sum"),
    ),
    _block(
        "attn_stream_write",
        "The weight with which attention's output is written to each residual stream.",
        ("position", "stream"),
        _STREAMS,
        "streams",
        ("stream_update",),
        read_only=_COEFFICIENT,
    ),
    _block(
        "attn_stream_mix",
        "The doubly-stochastic matrix that remixes the residual streams after attention's write.",
        ("position", "stream", "stream"),
        _STREAMS,
        "streams",
        ("stream_update",),
        read_only=_COEFFICIENT,
    ),
    _block(
        "resid_mid",
        "The residual between attention and MLP: what the norm before the MLP receives.",
        _RESIDUAL,
        _MODEL,
        "sequential_block",
        ("mid_sum", "mlp_input"),
        takes_stream=True,
    ),
    _block(
        "mlp_stream_collapse",
        "The one vector that the MLP reads from the residual streams, before its norm.",
        _RESIDUAL,
        _MODEL,
        "streams",
        ("stream_update",),
    ),
    _block(
        "mlp_in",
        "What the channel mixer was handed, after the norm before it where there is one.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("mlp_input",),
    ),
    _block(
        "mlp_pre",
        "The neurons before the activation function: the gate branch of a gated MLP.",
        _RESIDUAL,
        _NEURONS,
        "mlp",
        ("branches", "activation"),
        vllm=_FUSED_BRANCHES,
    ),
    _block(
        "mlp_pre_linear",
        "The linear branch of a gated MLP.",
        _RESIDUAL,
        _NEURONS,
        "gated_mlp",
        ("branches", "activation"),
        vllm=_FUSED_BRANCHES,
    ),
    _block(
        "mlp_act",
        "The neurons after the activation function, times the linear branch where there is one.",
        _RESIDUAL,
        _NEURONS,
        "mlp",
        ("activation", "mlp_output"),
    ),
    _block(
        "router_logits",
        "The router's output, one number per expert.",
        ("position", "expert"),
        ("n_experts",),
        "moe",
        ("routing",),
    ),
    _block(
        "expert_weights",
        "The weights of the chosen experts, in the router's ranking order: a selection out of n_experts.",
        ("position", "expert"),
        ("experts_per_token",),
        "moe",
        ("routing", "expert_sum"),
        vllm=_FUSED_EXPERTS,
    ),
    _block(
        "expert_indices",
        "Which experts were chosen, in the router's ranking order: a selection out of n_experts.",
        ("position", "expert"),
        ("experts_per_token",),
        "moe",
        ("routing", "expert_sum"),
        value="integer",
        read_only="it is an integer choice, not an activation",
        vllm=_FUSED_EXPERTS,
    ),
    _block(
        "mlp_out",
        "The channel mixer's own output, before any norm after it.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("mlp_output", "expert_sum", "mlp_contribution"),
    ),
    _block(
        "mlp_out_post",
        "What the MLP adds to the residual, its post-norm and multiplier included.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("mlp_contribution", "block_sum"),
    ),
    _block(
        "mlp_stream_write",
        "The weight with which the MLP's output is written to each residual stream.",
        ("position", "stream"),
        _STREAMS,
        "streams",
        ("stream_update",),
        read_only=_COEFFICIENT,
    ),
    _block(
        "mlp_stream_mix",
        "The matrix that remixes the residual streams after the MLP's write.",
        ("position", "stream", "stream"),
        _STREAMS,
        "streams",
        ("stream_update",),
        read_only=_COEFFICIENT,
    ),
    _block(
        "resid_post",
        "The residual leaving the block.",
        _RESIDUAL,
        _MODEL,
        "always",
        ("block_sum", "chain"),
        takes_stream=True,
    ),
    _block(
        "resid_streams",
        "The block's output as the whole stack of residual streams.",
        ("position", "stream", "neuron"),
        _STREAMS,
        "streams",
        ("stream_update",),
        takes_stream=True,
    ),
    _trunk(
        "final_norm",
        "The output of the trunk's last norm.",
        _MODEL,
        "final_norm",
        ("final_norm", "unembedding"),
    ),
    _trunk(
        "lm_head",
        "The bare unembedding, before the family's own scaling and soft-capping.",
        ("vocab_size",),
        "unembedding",
        ("unembedding",),
        vllm=Service(
            "unreachable",
            "vLLM unembeds, scales and soft-caps in one compute_logits call; ask for logits instead.",
        ),
    ),
    _trunk(
        "logits",
        "The model's logits, after the family's own scaling and soft-capping.",
        ("vocab_size",),
        "unembedding",
        ("logits",),
    ),
)

POINTS: Mapping[str, Point] = MappingProxyType({point.name: point for point in _ROWS})
"""Every point by its name, in the order in which a forward pass computes them."""


def vllm_hookable() -> frozenset[str]:
    """The names of the points that the vLLM backend serves, by a hook or by recomputing them."""
    return frozenset(name for name, point in POINTS.items() if point.vllm.served)


def reason(name: str) -> str | None:
    """Why the vLLM backend cannot serve a point, in one sentence; None where it can.

    Raises:
        UnknownPoint: no point has this name.
    """
    if name not in POINTS:
        raise UnknownPoint(
            asked=f"{name}: no such point",
            has=f"There are {len(POINTS)} points; locant.POINTS lists them",
            instead=did_you_mean(name, POINTS),
        )
    return POINTS[name].vllm.reason or None
