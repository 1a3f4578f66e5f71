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

INSTEAD: Mapping[Requirement, str] = MappingProxyType(
    {
        "sequential_block": "read resid_pre, which the MLP's norm reads, or attn_out_post, which attention adds",
        "attention": "read attn_in and attn_out_post, around the mixer",
        "qk_norm": "read query and key, the projections",
        "gated_attention": "read z, the attention output before W_O",
        "mlp": "read mlp_in and mlp_out_post, around it",
        "gated_mlp": "read mlp_pre, the only branch",
        "moe": "read mlp_pre and mlp_act, the neurons of a dense MLP",
        "streams": "read resid_pre, resid_mid and resid_post, the residual",
    }
)
"""What to read where a model or a block lacks what a point needs."""

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
        width: the factors whose product is what the last axis counts, heads included (for a stack of
            streams: the streams): names of facts, or ``query`` and ``key`` where the prompt decides.
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
_UNTAPPED_GATE = Service(
    "unimplemented", "The projection is a module on vLLM's tree too, but no tap is wired to it yet."
)
_FUSED_BRANCHES = Service(
    "unreachable",
    "vLLM computes both MLP branches in one fused gate_up_proj, so neither of them leaves a module.",
)
_FUSED_EXPERTS = Service(
    "unreachable",
    "vLLM picks the experts inside its fused MoE kernel, which returns only their combined output.",
)
_FUSED_LOGITS = Service(
    "unreachable", "vLLM unembeds, scales and soft-caps in one compute_logits call; ask for logits instead."
)

_COEFFICIENT = "it is a coefficient of the residual streams, not an activation"
_CHOICE = "it is an integer choice, not an activation"

_Names = tuple[str, ...]
_Shape = tuple[_Names, _Names]

_MODEL: _Shape = (("position", "neuron"), ("d_model",))
_NEURONS: _Shape = (("position", "neuron"), ("d_mlp",))
_VOCABULARY: _Shape = (("position", "neuron"), ("vocab_size",))
_HEADS: _Shape = (("position", "head", "neuron"), ("n_heads", "head_dim"))
_KV_HEADS: _Shape = (("position", "head", "neuron"), ("n_kv_heads", "head_dim"))
_PATTERN: _Shape = (("head", "dest_pos", "src_pos"), ("n_heads", "query", "key"))
_EXPERTS: _Shape = (("position", "expert"), ("n_experts",))
_CHOSEN: _Shape = (("position", "expert"), ("experts_per_token",))
_STACK: _Shape = (("position", "stream", "neuron"), ("n_streams",))
_STREAM_VECTOR: _Shape = (("position", "stream"), ("n_streams",))
_STREAM_MATRIX: _Shape = (("position", "stream", "stream"), ("n_streams",))


def _trunk(name: str, shape: _Shape, needs: Requirement, proof: _Names, meaning: str, vllm: Service = _HOOK) -> Point:
    axes, width = shape
    return Point(name, meaning, "trunk", axes, width, needs, "float", None, proof, _HOOK, vllm)


def _block(
    name: str,
    shape: _Shape,
    needs: Requirement,
    proof: _Names,
    meaning: str,
    *,
    value: Value = "float",
    read_only: str | None = None,
    vllm: Service = _HOOK,
    takes_stream: bool = False,
) -> Point:
    axes, width = shape
    return Point(name, meaning, "block", axes, width, needs, value, read_only, proof, _HOOK, vllm, takes_stream)


# The formatter would spread each row over ten lines, and a table has to be read as one.
# fmt: off
_ROWS = (
    _trunk("embeddings", _MODEL, "always", ("embedding",),
           "The embedding module's output, scaled where that module scales."),
    _block("resid_pre", _MODEL, "always", ("chain",),
           "The residual entering the block.", takes_stream=True),
    _block("attn_stream_collapse", _MODEL, "streams", ("stream_read", "attn_input"),
           "The one vector that attention reads from the residual streams, before its norm."),
    _block("attn_in", _MODEL, "always", ("attn_input",),
           "What the token mixer was handed, after the norm before it where there is one."),
    _block("query", _HEADS, "attention", ("projection", "rotation"),
           "The query projection per head, before any norm and before position encoding."),
    _block("key", _KV_HEADS, "attention", ("projection", "rotation"),
           "The key projection per head, before any norm and before position encoding."),
    _block("value", _KV_HEADS, "attention", ("projection", "mixing"),
           "The value projection per head."),
    _block("attn_gate", _HEADS, "gated_attention", ("mixing",),
           "The raw projection that the output gate is taken from, as wide as the module makes it: twice "
           "the heads where query and gate share one.", vllm=_UNTAPPED_GATE),
    _block("q_norm_in", _HEADS, "qk_norm", ("projection", "qk_norm"),
           "The query entering QK-norm."),
    _block("q_norm_out", _HEADS, "qk_norm", ("qk_norm", "rotation"),
           "The query leaving QK-norm."),
    _block("k_norm_in", _KV_HEADS, "qk_norm", ("projection", "qk_norm"),
           "The key entering QK-norm."),
    _block("k_norm_out", _KV_HEADS, "qk_norm", ("qk_norm", "rotation"),
           "The key leaving QK-norm."),
    _block("query_rotated", _HEADS, "attention", ("scores",),
           "The query that attention really multiplies, after norm and position encoding."),
    _block("key_rotated", _KV_HEADS, "attention", ("scores",),
           "The key that attention really multiplies, after norm and position encoding."),
    _block("attn_scores", _PATTERN, "attention", ("scores", "softmax"),
           "The query-key matrix as the softmax receives it: scaled, capped and masked, without sink "
           "columns.", vllm=_RECOMPUTE),
    _block("attn_probs", _PATTERN, "attention", ("softmax", "mixing"),
           "The attention pattern: what each query position takes from each key position, never "
           "renormalised.", vllm=_RECOMPUTE),
    _block("z", _HEADS, "attention", ("mixing", "attn_output"),
           "Each head's output before W_O, after the output gate where there is one."),
    _block("attn_out", _MODEL, "always", ("attn_output", "attn_contribution", "mid_sum", "block_sum"),
           "The token mixer's own output, before any norm after it."),
    _block("attn_out_post", _MODEL, "always", ("attn_contribution", "mid_sum", "block_sum"),
           "What attention adds to the residual, its post-norm and multiplier included."),
    _block("attn_stream_write", _STREAM_VECTOR, "streams", ("mid_sum",),
           "The weight with which attention's output is written to each residual stream.",
           read_only=_COEFFICIENT),
    _block("attn_stream_mix", _STREAM_MATRIX, "streams", ("mid_sum", "block_sum"),
           "The doubly-stochastic matrix that remixes the residual streams after attention's write.",
           read_only=_COEFFICIENT),
    _block("resid_mid", _MODEL, "sequential_block", ("mid_sum", "mlp_input", "stream_read"),
           "The residual between attention and MLP: what the norm before the MLP receives.",
           takes_stream=True),
    _block("mlp_stream_collapse", _MODEL, "streams", ("stream_read", "mlp_input"),
           "The one vector that the MLP reads from the residual streams, before its norm."),
    _block("mlp_in", _MODEL, "always", ("mlp_input",),
           "What the channel mixer was handed, after the norm before it where there is one."),
    _block("mlp_pre", _NEURONS, "mlp", ("branches", "activation"),
           "The neurons before the activation function: the gate branch of a gated MLP.",
           vllm=_FUSED_BRANCHES),
    _block("mlp_pre_linear", _NEURONS, "gated_mlp", ("branches", "activation"),
           "The linear branch of a gated MLP.", vllm=_FUSED_BRANCHES),
    _block("mlp_act", _NEURONS, "mlp", ("activation", "mlp_output"),
           "The neurons after the activation function, times the linear branch where there is one."),
    _block("router_logits", _EXPERTS, "moe", ("routing",),
           "The router's output, one number per expert."),
    _block("expert_weights", _CHOSEN, "moe", ("routing", "expert_sum"),
           "The weights of the chosen experts, in the router's ranking order: a selection out of n_experts.",
           vllm=_FUSED_EXPERTS),
    _block("expert_indices", _CHOSEN, "moe", ("routing", "expert_sum"),
           "Which experts were chosen, in the router's ranking order: a selection out of n_experts.",
           value="integer", read_only=_CHOICE, vllm=_FUSED_EXPERTS),
    _block("mlp_out", _MODEL, "always", ("mlp_output", "expert_sum", "mlp_contribution", "block_sum"),
           "The channel mixer's own output, before any norm after it."),
    _block("mlp_out_post", _MODEL, "always", ("mlp_contribution", "block_sum"),
           "What the MLP adds to the residual, its post-norm and multiplier included."),
    _block("mlp_stream_write", _STREAM_VECTOR, "streams", ("block_sum",),
           "The weight with which the MLP's output is written to each residual stream.",
           read_only=_COEFFICIENT),
    _block("mlp_stream_mix", _STREAM_MATRIX, "streams", ("block_sum",),
           "The matrix that remixes the residual streams after the MLP's write.", read_only=_COEFFICIENT),
    _block("resid_post", _MODEL, "always", ("block_sum", "chain"),
           "The residual leaving the block.", takes_stream=True),
    _block("resid_streams", _STACK, "streams", ("block_sum",),
           "The block's output as the whole stack of its residual streams, each d_model wide.",
           takes_stream=True),
    _trunk("final_norm", _MODEL, "final_norm", ("final_norm", "unembedding"),
           "The output of the trunk's last norm."),
    _trunk("lm_head", _VOCABULARY, "unembedding", ("unembedding", "logits"),
           "The bare unembedding, before the family's own scaling and soft-capping.", vllm=_FUSED_LOGITS),
    _trunk("logits", _VOCABULARY, "unembedding", ("logits",),
           "The model's logits, after the family's own scaling and soft-capping."),
)
# fmt: on

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
