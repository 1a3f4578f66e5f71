"""Every point of a forward pass, computed from the weights alone.

No module is called and no hook is used: each tensor is written out as arithmetic on named parameters, in float32, so
that a hook in a wrong place cannot agree with it. What families do differently is data, in `STYLES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel

_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class Style:
    """Where one family keeps its weights, and what it does with them.

    Attributes:
        qkv: the query, key and value projections, or the one that holds all three.
        packing: how the one is cut: ``runs`` (all queries, all keys, all values) or ``groups`` (in turn for each
            key head the queries that share it, the key and the value).
        norms: before attention, after it, before the MLP, after it; ``None`` for none.
        norm: ``rms``, ``gemma`` (its weight is stored less one) or ``layer``.
        neurons: the projections into the MLP, the gate first; one that holds both is cut in the middle.
        rotation: which numbers of a head turn together: ``halves``, ``pairs`` or ``none``.
        input_major: weight matrices are stored ``[in, out]``.
    """

    trunk: str = "model"
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    packing: str = "runs"
    out: str = "o_proj"
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    norm: str = "rms"
    neurons: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True
    rotation: str = "halves"
    input_major: bool = False


_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA = Style(norms=_SANDWICH, norm="gemma")
_PLAIN_MLP = {"norm": "layer", "neurons": ("dense_h_to_4h",), "down": "dense_4h_to_h", "gated": False}
_TRANSFORMER = {"trunk": "transformer", "blocks": "h", "final_norm": "ln_f"}

STYLES = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": Style(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")),
    "phi3": Style(qkv=("qkv_proj",), neurons=("gate_up_proj",)),
    "gpt_neox": Style(
        **_PLAIN_MLP,
        trunk="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        head="embed_out",
        attention="attention",
        qkv=("query_key_value",),
        packing="groups",
        out="dense",
    ),
    "cohere": Style(norms=("input_layernorm", None, "input_layernorm", None), norm="layer", rotation="pairs"),
    "falcon": Style(
        **_PLAIN_MLP,
        **_TRANSFORMER,
        embedding="word_embeddings",
        attention="self_attention",
        qkv=("query_key_value",),
        out="dense",
        norms=("input_layernorm", None, "input_layernorm", None),
    ),
    "falcon_grouped": Style(
        **_PLAIN_MLP,
        **_TRANSFORMER,
        embedding="word_embeddings",
        attention="self_attention",
        qkv=("query_key_value",),
        packing="groups",
        out="dense",
        norms=("ln_attn", None, "ln_mlp", None),
    ),
    "gpt2": Style(
        **_TRANSFORMER,
        embedding="wte",
        attention="attn",
        qkv=("c_attn",),
        out="c_proj",
        norms=("ln_1", None, "ln_2", None),
        norm="layer",
        neurons=("c_fc",),
        down="c_proj",
        gated=False,
        rotation="none",
        input_major=True,
    ),
    "gptj": Style(
        **_TRANSFORMER,
        embedding="wte",
        attention="attn",
        out="out_proj",
        norms=("ln_1", None, "ln_1", None),
        norm="layer",
        neurons=("fc_in",),
        down="fc_out",
        gated=False,
        rotation="pairs",
    ),
}
"""The families that differ from Llama's layout."""


class Reference:
    """One model's forward pass by hand: ``Reference(model)(ids)`` gives every point by its address.

    Ids are ``[batch, pos]`` without padding. Tensors are ``[batch, pos, width]``, heads side by side;
    ``attn_scores`` and ``attn_probs`` are ``[batch, head, query, key]``, with minus infinity at masked scores.
    ``Reference(model)(ids, {"resid_mid.1": f})`` puts ``f(x)`` in the place of a point ``x``, for everything after it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.config = config
        grouped = "_grouped" if getattr(config, "new_decoder_architecture", False) else ""
        self.style = STYLES.get(config.model_type + grouped, Style())
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self.n_layers = config.num_hidden_layers
        self.n_heads = config.num_attention_heads
        self.d_head = getattr(config, "head_dim", None) or config.hidden_size // self.n_heads
        multi_query = self._config("multi_query", default=False)
        grouped_heads = self._config("num_key_value_heads", "num_kv_heads", default=self.n_heads)
        self.n_kv_heads = 1 if multi_query else grouped_heads
        self.act = _ACTIVATIONS[self._config("hidden_activation", "hidden_act", "activation_function", "activation")]

    def __call__(self, ids: Tensor, change: dict[str, Callable[[Tensor], Tensor]] | None = None) -> dict[str, Tensor]:
        with torch.no_grad():
            tape = _Tape(change or {})
            residual = self._embed(ids, tape)
            for layer in range(self.n_layers):
                residual = self._block(layer, residual, tape)
            self._unembed(residual, tape)
        return tape

    # ---- the trunk

    def _embed(self, ids: Tensor, tape: dict[str, Tensor]) -> Tensor:
        table = self.weights[f"{self.style.trunk}.{self.style.embedding}.weight"]
        embedded = table[ids].float()
        if self.style.norm == "gemma":  # the scale is rounded to the model's dtype
            embedded = embedded * torch.tensor(self.config.hidden_size**0.5).to(table.dtype).float()
        tape["embeddings"] = embedded
        embedded = tape["embeddings"]
        positions = self.weights.get(f"{self.style.trunk}.wpe.weight")
        if positions is not None:
            return embedded + positions[: ids.shape[1]].float()
        return embedded * self._config("embedding_multiplier", default=1.0)

    def _unembed(self, residual: Tensor, tape: dict[str, Tensor]) -> None:
        style = self.style
        tape["final_norm"] = self._norm(residual, f"{style.trunk}.{style.final_norm}")
        normed = tape["final_norm"]
        head = style.head if f"{style.head}.weight" in self.weights else "lm_head"
        unembedded = F.linear(normed, self._weight(f"{head}.weight"), self._optional(f"{head}.bias"))
        tape["lm_head"] = unembedded
        unembedded = tape["lm_head"]
        cap = self._config("final_logit_softcapping", default=None)
        scaled = unembedded * self._config("logit_scale", default=1.0) / self._config("logits_scaling", default=1.0)
        tape["logits"] = scaled if cap is None else cap * torch.tanh(scaled / cap)

    # ---- one block

    def _block(self, layer: int, residual: Tensor, tape: dict[str, Tensor]) -> Tensor:
        put = _Notes(tape, layer)
        path = f"{self.style.trunk}.{self.style.blocks}.{layer}"
        before, after, before_mlp, after_mlp = (n and f"{path}.{n}" for n in self.style.norms)
        put.resid_pre = residual
        residual = put.resid_pre
        put.attn_in = self._norm(residual, before)
        put.attn_out = self._attention(layer, f"{path}.{self.style.attention}", put.attn_in, put)
        multiplier = self._config("residual_multiplier", default=1.0)
        put.attn_out_post = self._norm(put.attn_out, after) * multiplier
        middle = residual + put.attn_out_post
        if not self._parallel():
            put.resid_mid = middle
            middle = put.resid_mid
        put.mlp_in = self._norm(residual if self._parallel() else middle, before_mlp)
        put.mlp_out = self._mlp(f"{path}.mlp", put.mlp_in, put)
        put.mlp_out_post = self._norm(put.mlp_out, after_mlp) * multiplier
        put.resid_post = middle + put.mlp_out_post
        return put.resid_post

    def _parallel(self) -> bool:
        by_config = self._config("use_parallel_residual", "parallel_attn", default=False)
        return by_config or self.config.model_type in ("gptj", "cohere")

    def _attention(self, layer: int, path: str, x: Tensor, put: "_Notes") -> Tensor:
        query, key, value = self._project(path, x)
        put.query, put.key, put.value = query, key, value
        query, key, value = put.query, put.key, put.value
        if f"{path}.q_norm.weight" in self.weights:
            put.q_norm_in, put.k_norm_in = query, key
            put.q_norm_out = self._head_norm(put.q_norm_in, f"{path}.q_norm")
            put.k_norm_out = self._head_norm(put.k_norm_in, f"{path}.k_norm")
            query, key = put.q_norm_out, put.k_norm_out
        query = self._rotate(_heads(query, self.n_heads), layer)
        key = self._rotate(_heads(key, self.n_kv_heads), layer)
        put.query_rotated, put.key_rotated = _flat(query), _flat(key)
        query, key = _heads(put.query_rotated, self.n_heads), _heads(put.key_rotated, self.n_kv_heads)
        group = self.n_heads // self.n_kv_heads  # query head h reads the key head h // group
        key, spread = (t.repeat_interleave(group, 1) for t in (key, _heads(value, self.n_kv_heads)))
        by_width = self._config("query_pre_attn_scalar", default=self.d_head) ** -0.5
        scores = query @ key.transpose(-1, -2) * self._config("attention_multiplier", default=by_width)
        cap = self._config("attn_logit_softcapping", default=None)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        put.attn_scores = scores.masked_fill(~self._seen(layer, x.shape[1]), float("-inf"))
        put.attn_probs = put.attn_scores.softmax(-1)
        put.z = _flat(put.attn_probs @ spread)
        return self._linear(put.z, f"{path}.{self.style.out}")

    def _project(self, path: str, x: Tensor) -> tuple[Tensor, ...]:
        made = [self._linear(x, f"{path}.{name}") for name in self.style.qkv]
        if len(made) == 3:
            return tuple(made)
        if self.style.packing == "groups":
            group = self.n_heads // self.n_kv_heads
            each = made[0].unflatten(-1, (self.n_kv_heads, group + 2, self.d_head)).split((group, 1, 1), -2)
            return tuple(part.flatten(-3) for part in each)
        widths = [self.n_heads * self.d_head, *[self.n_kv_heads * self.d_head] * 2]
        return made[0].split(widths, -1)

    def _seen(self, layer: int, n_pos: int) -> Tensor:
        distance = torch.arange(n_pos)[:, None] - torch.arange(n_pos)
        seen = distance >= 0
        kinds = self._config("layer_types", default=None)
        local = kinds is None or kinds[layer] == "sliding_attention"
        window = self._config("sliding_window", default=None) if local else None
        return seen if window is None else seen & (distance < window)

    def _rotate(self, x: Tensor, layer: int) -> Tensor:
        """Turn pairs of numbers in each head ``[batch, head, pos, d_head]`` by an angle that grows with position."""
        if self.style.rotation == "none":
            return x
        rope = self._config("rope_parameters", default={})
        if "sliding_attention" in rope:
            rope = rope[self.config.layer_types[layer]]
        width = self._config("rotary_dim", default=int(self.d_head * rope.get("partial_rotary_factor", 1.0)))
        speeds = rope.get("rope_theta", 10_000.0) ** -(torch.arange(0, width, 2).float() / width)
        angles = torch.arange(x.shape[-2]).float()[:, None] * speeds
        turned, rest = x[..., :width], x[..., width:]
        if self.style.rotation == "pairs":
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned.chunk(2, -1)
        a, b = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        together = torch.stack((a, b), -1).flatten(-2) if self.style.rotation == "pairs" else torch.cat((a, b), -1)
        return torch.cat((together, rest), -1)

    def _mlp(self, path: str, x: Tensor, put: "_Notes") -> Tensor:
        if f"{path}.experts.down_proj" in self.weights:
            return self._experts(path, x, put)
        made = [self._linear(x, f"{path}.{name}") for name in self.style.neurons]
        if self.style.gated and len(made) == 1:
            made = list(made[0].chunk(2, -1))
        put.mlp_pre = made[0]
        act = self.act(put.mlp_pre)
        if self.style.gated:
            put.mlp_pre_linear = made[1]
            act = act * put.mlp_pre_linear
        put.mlp_act = act
        return self._linear(put.mlp_act, f"{path}.{self.style.down}")

    def _experts(self, path: str, x: Tensor, put: "_Notes") -> Tensor:
        put.router_logits = F.linear(x, self._weight(f"{path}.gate.weight"))
        weights, chosen = put.router_logits.softmax(-1).topk(self.config.num_experts_per_tok, -1)
        if self._config("norm_topk_prob", default=self.config.model_type == "mixtral"):
            weights = weights / weights.sum(-1, keepdim=True)
        put.expert_weights, put.expert_indices = weights, chosen
        weights = put.expert_weights
        inner, outer = (self._weight(f"{path}.experts.{n}") for n in ("gate_up_proj", "down_proj"))
        gate, linear = torch.einsum("epd,bsd->bsep", inner, x).chunk(2, -1)
        each = torch.einsum("edp,bsep->bsed", outer, self.act(gate) * linear)
        taken = each.gather(2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return (weights[..., None] * taken).sum(2)

    # ---- weights

    def _norm(self, x: Tensor, path: str | None) -> Tensor:
        if path is None:
            return x
        weight = self._weight(f"{path}.weight")
        eps = self._config("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
        if self.style.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        if self.style.norm == "layer":
            bias = self._optional(f"{path}.bias")
            return x * weight if bias is None else x * weight + bias
        return x * (1 + weight if self.style.norm == "gemma" else weight)

    def _head_norm(self, x: Tensor, path: str) -> Tensor:
        """The norm of queries or keys, over each head or over all of them, as its weight is wide."""
        each = x.unflatten(-1, (-1, self._weight(f"{path}.weight").shape[0]))
        return self._norm(each, path).flatten(-2)

    def _linear(self, x: Tensor, path: str) -> Tensor:
        weight, bias = self._weight(f"{path}.weight"), self._optional(f"{path}.bias")
        return F.linear(x, weight.T if self.style.input_major else weight, bias)

    def _weight(self, name: str) -> Tensor:
        return self.weights[name].float()

    def _optional(self, name: str) -> Tensor | None:
        return self._weight(name) if name in self.weights else None

    def _config(self, *names: str, **default: object) -> object:
        found = (getattr(self.config, name, None) for name in names)
        value = next((v for v in found if v is not None), None)
        if value is None and "default" not in default:
            raise AttributeError(f"the config has none of {names}")
        return default["default"] if value is None else value


class _Tape(dict[str, Tensor]):
    """Points by address, some of them changed as they are computed."""

    def __init__(self, change: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self._change = change

    def __setitem__(self, address: str, value: Tensor) -> None:
        super().__setitem__(address, self._change[address](value) if address in self._change else value)


class _Notes:
    """Points of one layer as attributes, written to the tape under their addresses."""

    def __init__(self, tape: dict[str, Tensor], layer: int) -> None:
        self.__dict__["_tape"], self.__dict__["_layer"] = tape, layer

    def __setattr__(self, point: str, value: Tensor) -> None:
        self._tape[f"{point}.{self._layer}"] = value

    def __getattr__(self, point: str) -> Tensor:
        return self._tape[f"{point}.{self._layer}"]


def _heads(x: Tensor, n_heads: int) -> Tensor:
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)
