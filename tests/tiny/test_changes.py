"""What changes after a model was examined, and what it does not do on every prompt, is noticed."""

import pytest
import torch
from torch import nn

import families
import locant
from families import loaded, token_ids


class Adapted(nn.Module):
    """A linear map with a low-rank one beside it, as adapters put it in place of the map."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.low(x))


def test_an_adapter_put_in_after_loading_is_seen_by_the_next_capture():
    model = locant.load_model(families.fresh("llama"))
    model.capture(token_ids(), ["resid_mid.1", "mlp_act.1", "resid_post.1"])
    mlp = model.hf.model.layers[1].mlp
    mlp.gate_proj = Adapted(mlp.gate_proj)
    seen: list[torch.Tensor] = []
    hook = mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    cache = model.capture(token_ids(), ["resid_mid.1", "mlp_act.1", "resid_post.1"])
    hook.remove()
    assert torch.equal(cache["mlp_act.1"], seen[-1])


def test_blocks_put_in_another_order_are_read_in_that_order():
    model = locant.load_model(families.fresh("llama"))
    model.capture(token_ids(), "mlp_out_post.1")
    model.hf.model.layers = nn.ModuleList([model.hf.model.layers[i] for i in (1, 0, 2)])
    again = locant.load_model(model.hf)
    one, other = (m.capture(token_ids(), "mlp_out_post.1")["mlp_out_post.1"] for m in (model, again))
    assert torch.equal(one, other)


def test_attention_in_chunks_of_queries_is_not_served_as_a_whole():
    hf = families.fresh("llama", "sdpa")
    attention = hf.model.layers[1].self_attn
    whole = attention.forward

    def chunked(hidden_states: torch.Tensor, **others: object) -> object:
        if hidden_states.shape[1] <= 8:
            return whole(hidden_states=hidden_states, **others)
        halves = hidden_states[:, :8], hidden_states
        cos, sin = others.pop("position_embeddings")
        parts = [
            whole(hidden_states=h, position_embeddings=(cos[:, : h.shape[1]], sin[:, : h.shape[1]]), **others)
            for h in halves
        ]
        return parts[1]

    attention.forward = chunked
    model = locant.load_model(hf)
    assert model.capture(token_ids(length=6), "attn_probs.1")["attn_probs.1"].shape[-1] == 6
    with pytest.raises(locant.PointUnavailable, match="shape"):
        model.capture(token_ids(length=12), "attn_probs.1")


def test_dropout_in_one_forgotten_module_is_off_while_reading():
    hf = families.fresh("gpt2")
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    hf.transformer.h[1].train()
    model = locant.load_model(hf)
    first, second = (model.capture(token_ids(), "resid_post.2")["resid_post.2"] for _ in range(2))
    assert torch.equal(first, second)
    assert hf.transformer.h[1].training
    assert not hf.training


def test_selected_positions_cannot_be_differentiated_by():
    with pytest.raises(locant.PromptError, match="grad"):
        loaded("llama").capture(token_ids(), "resid_post.1", positions=-1, grad=True)


def test_options_for_a_model_that_is_loaded_already_are_refused():
    with pytest.raises(locant.ModelError, match="dtype"):
        locant.load_model(families.tiny("llama"), dtype=torch.float16)


def test_a_checkpoint_without_some_of_its_tensors_is_refused(tmp_path):
    hf = families.fresh("llama")
    weights = {k: v for k, v in hf.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    hf.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(locant.ModelError, match="lacks"):
        locant.load_model(tmp_path)


def test_weights_that_are_not_numbers_are_said_so():
    hf = families.fresh("llama")
    with torch.no_grad():
        hf.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(locant.ModelError, match="not finite"):
        locant.load_model(hf)


def test_short_and_long_prompts_are_kept_apart_where_the_longest_decides_the_rotation():
    hf = families.fresh("phi3")
    hf.config.rope_parameters = dict(hf.config.rope_parameters) | {
        "rope_type": "longrope",
        "original_max_position_embeddings": 8,
    }
    model = locant.load_model(hf)
    model.capture([[5, 6, 7], [5, 6]], "resid_post.1")
    with pytest.raises(locant.PromptError, match="longest"):
        model.capture([list(range(5, 17)), [5, 6]], "resid_post.1")


def test_unembed_refuses_where_more_than_a_norm_stands_before_the_head():
    hf = families.fresh("llama")
    hf.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 0.5 + 1,))
    model = locant.load_model(hf)
    with pytest.raises(locant.PointUnavailable, match="unembed"):
        model.unembed(torch.zeros(1, hf.config.hidden_size))


def test_float16_masks_of_eager_attention_are_masks():
    model = loaded("gptj", "eager", torch.float16)
    assert not [str(r.address) for r in model.points() if r.proof in ("refused", "vacuous")]
