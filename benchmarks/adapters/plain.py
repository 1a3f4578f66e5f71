"""The Hugging Face model that everything is measured against."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

# Modules of a Llama block whose input no other module returns.
INNER_INPUTS = ("self_attn.o_proj", "post_attention_layernorm", "mlp.down_proj")


def load(folder: str, attention: str = "sdpa") -> Any:
    """The model of `folder` in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()
