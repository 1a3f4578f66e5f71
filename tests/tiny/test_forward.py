"""How a forward is read: no further than needed, each tensor as it was at its moment, with gradients on request."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import families
import locant
from comparing import assert_close, errors
from families import loaded, token_ids
from reference import Reference


@contextmanager
def counted(model: locant.EagerModel) -> Iterator[Counter[str]]:
    """How often each module begins to run, as hooks of the user's own see it."""
    began: Counter[str] = Counter()
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: began.update([path]))
        for path, module in model.hf.named_modules()
    ]
    try:
        yield began
    finally:
        for hook in hooks:
            hook.remove()


# ---- no further than needed


@pytest.mark.parametrize(
    ("addresses", "last", "never"),
    [
        (["embeddings"], "model.embed_tokens", "model.layers.0.self_attn"),
        (["resid_pre.1"], "model.layers.0", "model.layers.1.self_attn"),
        (["attn_in.1"], "model.layers.1.input_layernorm", "model.layers.1.self_attn.o_proj"),
        (["attn_probs.1"], "model.layers.1.self_attn", "model.layers.1.mlp"),
        (["query_rotated.1"], "model.layers.1.self_attn", "model.layers.1.self_attn.o_proj"),
        (["resid_mid.1"], "model.layers.1.self_attn", "model.layers.1.mlp"),
        (["mlp_pre.1"], "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"),
        (["resid_post.1", "resid_post.0"], "model.layers.1.mlp", "model.layers.2.self_attn"),
        (["model.layers.1.mlp.up_proj"], "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"),
        (["resid_post.2"], "model.layers.2.mlp", "lm_head"),
        (["final_norm"], "model.norm", "lm_head"),
        (["lm_head"], "lm_head", None),
    ],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_forward_stops_after_the_last_point_it_is_asked_for(attention, addresses, last, never):
    model = loaded("llama", attention)
    model.capture(token_ids(), addresses)
    with counted(model) as began:
        model.capture(token_ids(), addresses)
    assert began[last] == 1
    assert never is None or not began[never]
    assert set(began.values()) == {1}


def test_the_vocabulary_is_not_unembedded_unless_asked_for():
    model = loaded("llama")
    without = [a for a in model.points().served() if a.name not in ("lm_head", "logits")]
    with counted(model) as began:
        model.capture(token_ids(), without)
        assert not began["lm_head"]
        model.run_with_cache(token_ids(), "resid_post.0")
        assert began["lm_head"] == 1


def test_asking_what_is_served_runs_nothing():
    model = loaded("llama")
    with counted(model) as began:
        model.points().rows()
        model.refuses("resid_post.1")
        model.refuses("no_such_point.1")
        model.plan(["resid_post.1", "attn_probs.0"])
        assert not began


def test_scores_of_one_layer_leave_the_fused_attention_of_the_others_alone(monkeypatch):
    model = loaded("llama", "sdpa")
    fused = nn.functional.scaled_dot_product_attention
    calls = []

    def watched(*args, **kwargs):
        calls.append(1)
        return fused(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    model.capture(token_ids(), ["resid_post.2"])
    assert len(calls) == families.LAYERS
    calls.clear()
    model.capture(token_ids(), ["attn_scores.1", "resid_post.2"])
    assert len(calls) >= families.LAYERS - 1


# ---- tensors that are overwritten later


class AddsInPlace(LlamaDecoderLayer):
    """A block that adds to the residual where it lies, so that all of its residuals are one memory."""

    def forward(self, hidden_states, **kwargs):
        hidden_states += self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
        hidden_states += self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class MultipliesInPlace(Phi3MLP):
    """An MLP that overwrites both branches while it uses them."""

    def forward(self, hidden_states):
        gate, linear = self.gate_up_proj(hidden_states).chunk(2, -1)
        linear.mul_(self.activation_fn(gate))
        gate.zero_()
        out = self.down_proj(linear)
        linear.zero_()
        return out


def turned_into(hf: nn.Module, old: type, new: type) -> nn.Module:
    for module in hf.modules():
        if type(module) is old:
            module.__class__ = new
    return hf


IN_PLACE = {
    "residual": lambda: turned_into(families.fresh("llama"), LlamaDecoderLayer, AddsInPlace),
    "branches": lambda: turned_into(families.fresh("phi3"), Phi3MLP, MultipliesInPlace),
    "falcon": lambda: families.fresh("falcon"),
}


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("length", [9, 1])
def test_a_tensor_that_is_overwritten_later_is_captured_as_it_was(kind, length):
    model = locant.load_model(IN_PLACE[kind]())
    ids = token_ids(length=length)
    wanted = Reference(model.hf)(ids)
    assert {str(a) for a in model.points().served()} == set(wanted)
    for address in model.points().served():
        assert_close(model.capture(ids, address)[address], wanted[str(address)], address)
    for address, tensor in model.capture(ids, model.points().served()).items():
        assert_close(tensor, wanted[str(address)], address)
    with torch.no_grad():
        assert torch.equal(model.run_with_cache(ids, "resid_pre.0")[0], model.hf(ids, use_cache=False).logits)


@pytest.mark.parametrize("length", [9, 1])
def test_a_prompt_of_one_token_does_not_hide_that_its_tensors_are_overwritten(length):
    """The survey's prompt has several tokens, and a slice of one row is laid out as no slice of more is."""
    model = locant.load_model(IN_PLACE["branches"]())
    wanted = Reference(model.hf)(token_ids(1, length))
    for name in ("mlp_pre.1", "mlp_pre_linear.1", "mlp_act.1"):
        assert_close(model.capture(token_ids(1, length), name)[name], wanted[name], name)


def test_keeping_falcons_mlp_output_by_reference_would_be_wrong():
    """What the test above rests on: the memory that the MLP returned holds the attention's output as well, later."""
    model = locant.load_model(families.fresh("falcon"))
    kept = []
    hook = model.hf.transformer.h[1].mlp.register_forward_hook(lambda _, __, out: kept.append(out))
    with torch.no_grad():
        model.hf(token_ids(), use_cache=False)
    hook.remove()
    cache = model.capture(token_ids(), ["mlp_out.1", "attn_out.1"])
    assert_close(kept[0], cache["mlp_out.1"] + cache["attn_out.1"])
    assert errors(kept[0], cache["mlp_out.1"])[0] > 0.1


def test_a_hook_of_the_users_that_overwrites_in_place_does_not_change_what_came_before_it():
    model = locant.load_model(families.fresh("llama"))
    wanted = model.capture(token_ids(), "mlp_act.1")["mlp_act.1"].clone()
    hook = model.hf.model.layers[1].mlp.register_forward_hook(lambda _, args, out: out.zero_())
    cache = model.capture(token_ids(), ["mlp_act.1", "mlp_out.1", "resid_mid.1", "resid_post.1"])
    hook.remove()
    assert torch.equal(cache["mlp_act.1"], wanted)
    assert errors(cache["mlp_out.1"], torch.zeros_like(cache["mlp_out.1"]))[0] > 0
    assert torch.equal(cache["resid_post.1"], cache["resid_mid.1"])


# ---- what was captured is the user's


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_later_forward_leaves_what_was_captured_alone(family):
    model = loaded(family)
    cache = model.capture(token_ids(seed=1), model.points().served())
    before = {address: tensor.clone() for address, tensor in cache.items()}
    model.capture(token_ids(seed=2), model.points().served())
    model.run_with_cache([[5, 6], [7]], "attn_probs.1")
    for address, tensor in cache.items():
        assert torch.equal(tensor, before[address]), address


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_captured_tensor_is_memory_of_the_models(family):
    model = loaded(family)
    own = {t.untyped_storage().data_ptr() for t in [*model.hf.parameters(), *model.hf.buffers()]}
    cache = model.capture(token_ids(), model.points().served())
    assert not [a for a, t in cache.items() if t.untyped_storage().data_ptr() in own]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_changing_what_was_captured_does_not_change_the_model(family):
    model = loaded(family)
    first = model.capture(token_ids(), model.points().served())
    before = {address: tensor.clone() for address, tensor in first.items()}
    for tensor in first.values():
        tensor.zero_()
    for address, tensor in model.capture(token_ids(), model.points().served()).items():
        assert torch.equal(tensor, before[address]), address


def test_captures_are_plain_tensors_even_inside_inference_mode():
    model = loaded("gpt2")
    with torch.inference_mode():
        cache = model.capture(token_ids(), ["resid_post.1", "attn_probs.1", "value.1"])
    for tensor in cache.values():
        assert not tensor.is_inference()
        assert not tensor.requires_grad
        weight = torch.ones(tensor.shape[-1], requires_grad=True)
        (tensor * weight).sum().backward()
        assert weight.grad is not None


# ---- gradients


def gradients(model: locant.EagerModel, names: list[str]) -> tuple[dict[str, torch.Tensor], locant.Cache]:
    cache = model.capture(token_ids(), [*names, "logits"], grad=True)
    of = cache["logits"][:, -1, 7].sum()
    got = torch.autograd.grad(of, [cache[name] for name in names])
    return dict(zip(names, got, strict=True)), cache


@pytest.mark.parametrize(("family", "attention"), families.ROUTES)
def test_a_gradient_reaches_every_captured_tensor(family, attention):
    model = loaded(family, attention)
    chosen = ("expert_indices", "lm_head", "logits")
    names = [str(a) for a in model.points().served() if a.layer in (None, 1) and a.name not in chosen]
    for name, gradient in gradients(model, names)[0].items():
        assert bool(gradient.isfinite().all()), name
        if name != "router_logits.1":
            assert bool(gradient.abs().max() > 0), name


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gpt_neox", "sdpa")])
def test_gradients_obey_the_chain_rule_between_points(family, attention):
    model = loaded(family, attention)
    names = "query_rotated key_rotated value attn_scores attn_probs z attn_out attn_out_post mlp_out resid_post".split()
    got, cache = gradients(model, [f"{n}.1" for n in names])
    d = {n: got[f"{n}.1"] for n in names}
    t = {n: cache[f"{n}.1"].detach() for n in names}
    facts = model.facts
    group = facts.n_heads // facts.n_kv_heads

    def heads(x, n):
        return x.unflatten(-1, (n, -1)).transpose(1, 2)

    w_o = model.hf.get_submodule(model.anatomy.blocks[1].modules["w_o"]).weight.detach()
    assert_close(d["z"], d["attn_out"] @ w_o)
    assert_close(d["attn_out_post"], d["attn_out"])
    assert_close(d["mlp_out"], d["resid_post"])
    value = heads(t["value"], facts.n_kv_heads).repeat_interleave(group, 1)
    assert_close(d["attn_probs"], heads(d["z"], facts.n_heads) @ value.transpose(-1, -2))
    through = d["attn_probs"] * t["attn_probs"]
    assert_close(d["attn_scores"], through - t["attn_probs"] * through.sum(-1, keepdim=True), row=1e-3)
    per_head = t["attn_probs"].transpose(-1, -2) @ heads(d["z"], facts.n_heads)
    summed = per_head.unflatten(1, (facts.n_kv_heads, group)).sum(2)
    assert_close(d["value"], summed.transpose(1, 2).flatten(-2))
    key = heads(t["key_rotated"], facts.n_kv_heads).repeat_interleave(group, 1)
    turned = d["attn_scores"] @ key * facts.head_dim**-0.5
    assert_close(d["query_rotated"], turned.transpose(1, 2).flatten(-2), row=1e-3)


def test_a_gradient_asked_for_twice_is_the_same_twice():
    model = loaded("llama")
    first, second = (gradients(model, ["resid_post.1", "embeddings"])[0] for _ in range(2))
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name])
    assert all(weight.grad is None for weight in model.hf.parameters())


def test_a_gradient_is_the_models_own():
    model = loaded("llama")
    kept = []

    def keep(_: nn.Module, __: object, out: torch.Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    hook = model.hf.model.layers[1].register_forward_hook(keep)
    model.hf(token_ids(), use_cache=False).logits[:, -1, 7].sum().backward()
    hook.remove()
    model.hf.zero_grad(set_to_none=True)
    assert_close(gradients(model, ["resid_post.1"])[0]["resid_post.1"], kept[0].grad)


def test_values_with_gradients_are_the_values_without():
    for family, attention in families.ROUTES:
        model = loaded(family, attention)
        served = model.points().served()
        with_graph = model.capture(token_ids(), served, grad=True)
        for address, tensor in model.capture(token_ids(), served).items():
            assert_close(with_graph[address].detach(), tensor, address)
