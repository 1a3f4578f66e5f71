"""Tiny models of every supported family, with weights that make a wrong tensor visible.

Random initialisation as transformers does it has norms of one, biases of zero and sublayers that add next to nothing,
so that many tensors look alike. Here no two do: norm weights differ from one, biases from zero, and sublayers add as
much as the residual holds. Heads are wider than ``d_model / n_heads`` where the config allows it, keys and values are
shared by several queries where the family has that, and windows and soft-caps are small enough to bite.
"""

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from locant import EagerModel

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, NEURONS, CONTEXT = 97, 48, 3, 4, 2, 80, 64
WINDOW = 4
LOCAL_GLOBAL_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Family:
    """How to build one family.

    Attributes:
        cls: the class of the model; its config class has the same stem.
        sizes: what the config is told, over `_SIZES`.
    """

    cls: str
    sizes: dict[str, Any] = field(default_factory=dict)


def _rope(theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": NEURONS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rope_parameters": _rope(),
}
_ROUTED = {"num_experts_per_tok": 2, "num_experts": 5, "num_local_experts": 5, "moe_intermediate_size": 24}
_CAPPED = {"query_pre_attn_scalar": 9, "final_logit_softcapping": 3.0, "sliding_window": WINDOW}
_CAPPED |= {"layer_types": LOCAL_GLOBAL_LOCAL, "head_dim": 16}
_NEOX = {"rope_parameters": _rope(partial_rotary_factor=0.5)}
_LOCAL_GLOBAL = {"sliding_attention": _rope(), "full_attention": _rope(1_000_000.0)}

FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", {"n_inner": NEURONS, "tie_word_embeddings": True}),
    "llama": Family("LlamaForCausalLM", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "mistral": Family("MistralForCausalLM", {"head_dim": 16, "sliding_window": WINDOW}),
    "qwen2": Family("Qwen2ForCausalLM", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": Family("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": Family("Gemma2ForCausalLM", {**_CAPPED, "attn_logit_softcapping": 3.0}),
    "gemma3_text": Family("Gemma3ForCausalLM", {**_CAPPED, "num_key_value_heads": 1, "rope_parameters": _LOCAL_GLOBAL}),
    "olmo2": Family("Olmo2ForCausalLM", {"head_dim": 16}),
    "gpt_neox": Family("GPTNeoXForCausalLM", {**_NEOX, "use_parallel_residual": True}),
    "gpt_neox_sequential": Family("GPTNeoXForCausalLM", {**_NEOX, "use_parallel_residual": False}),
    "gptj": Family("GPTJForCausalLM", {"rotary_dim": 8}),
    "phi3": Family("Phi3ForCausalLM", {"head_dim": 16, "rope_parameters": _rope(partial_rotary_factor=0.5)}),
    "mixtral": Family("MixtralForCausalLM", {**_ROUTED, "head_dim": 16}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {**_ROUTED, "head_dim": 16, "mlp_only_layers": [1]}),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "cohere": Family("CohereForCausalLM", {"logit_scale": 0.25}),
    "falcon": Family("FalconForCausalLM", {"multi_query": True, "parallel_attn": True, "bias": True}),
    "falcon_grouped": Family(
        "FalconForCausalLM", {"multi_query": False, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS}
    ),
}

_OTHER_NAMES = {
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT},
    "gptj": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT, "n_inner": NEURONS},
    "falcon": {"ffn_hidden_size": NEURONS},
}


def attentions(name: str) -> list[str]:
    """The attention implementations the family supports."""
    return ["eager", "sdpa"] if getattr(transformers, FAMILIES[name].cls)._supports_sdpa else ["eager"]


ROUTES = [(name, attention) for name in FAMILIES for attention in attentions(name)]
"""Every family with every attention implementation it supports."""


@cache
def tiny(name: str, attention: str | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a family, the same object each time: do not change it."""
    return fresh(name, attention, dtype)


@cache
def loaded(name: str, attention: str | None = None, dtype: torch.dtype = torch.float32) -> EagerModel:
    """`tiny(...)` with its points found and proven, the same object each time: leave it as it is."""
    return EagerModel(tiny(name, attention, dtype))


def fresh(
    name: str,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> PreTrainedModel:
    """A model of one's own, equal to `tiny(name)` unless `sizes` say otherwise."""
    family = FAMILIES[name]
    cls = getattr(transformers, family.cls)
    known = cls.config_class.__dataclass_fields__
    common = {k: v for k, v in (_SIZES | _OTHER_NAMES.get(name, {})).items() if k in known}
    config = cls.config_class(**copy.deepcopy(common | family.sizes | sizes))
    attention = attention or ("sdpa" if cls._supports_sdpa else "eager")
    model = cls._from_config(config, attn_implementation=attention, dtype=torch.float32)
    fill(model, seed=sum(map(ord, name)))
    return model.to(dtype).eval()


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every weight a value that shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * 0.7 / weight.shape[-1] ** 0.5)
            else:  # a norm's weight is initialised to one (a family that adds one: to zero), a bias to zero
                weight.add_(0.3 * noise)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.mul_(4)


def token_ids(batch: int = 2, length: int = 9, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """Random token ids ``[batch, length]``, none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocabulary, (batch, length), generator=generator)
