"""Every point of every family, against the same forward pass computed from the weights alone."""

import pytest
import torch

import families
import locant
from comparing import assert_close, errors
from families import loaded
from locant import Address
from reference import Reference

ROUTES = pytest.mark.parametrize(("family", "attention"), families.ROUTES)
LAYERS = range(families.LAYERS)

TRUNK = {"embeddings", "final_norm", "lm_head", "logits"}
BLOCK = set(
    "resid_pre attn_in query key value query_rotated key_rotated attn_scores attn_probs z attn_out attn_out_post "
    "mlp_in mlp_out mlp_out_post resid_post".split()
)
SEQUENTIAL = {"resid_mid"}
NORMED = {"q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"}
PLAIN = {"mlp_pre", "mlp_act"}
GATED = PLAIN | {"mlp_pre_linear"}
ROUTED = {"router_logits", "expert_weights", "expert_indices"}

BESIDES = {
    "gpt2": SEQUENTIAL | PLAIN,
    "llama": SEQUENTIAL | GATED,
    "mistral": SEQUENTIAL | GATED,
    "qwen2": SEQUENTIAL | GATED,
    "qwen3": SEQUENTIAL | GATED | NORMED,
    "gemma2": SEQUENTIAL | GATED,
    "gemma3_text": SEQUENTIAL | GATED | NORMED,
    "olmo2": SEQUENTIAL | GATED | NORMED,
    "gpt_neox": PLAIN,
    "gpt_neox_sequential": SEQUENTIAL | PLAIN,
    "gptj": PLAIN,
    "phi3": SEQUENTIAL | GATED,
    "mixtral": SEQUENTIAL | ROUTED,
    "qwen3_moe": SEQUENTIAL | NORMED | ROUTED,
    "granite": SEQUENTIAL | GATED,
    "cohere": GATED,
    "falcon": PLAIN,
    "falcon_grouped": PLAIN,
}
"""What the blocks of a family have beyond `BLOCK`."""

DENSE = {("qwen3_moe", 1): SEQUENTIAL | NORMED | GATED}
"""The layers that are not as the others of their family."""


def expected(family: str) -> set[Address]:
    blocks = {Address(name, layer) for layer in LAYERS for name in BLOCK | DENSE.get((family, layer), BESIDES[family])}
    return blocks | {Address(name) for name in TRUNK}


def own_forward(model: locant.EagerModel, ids: torch.Tensor, **options: object):
    with torch.no_grad():
        return model.hf(input_ids=ids, use_cache=False, **options)


# ---- which points there are


@ROUTES
def test_a_family_serves_the_points_it_has_and_all_of_them_are_proven(family, attention):
    points = loaded(family, attention).points()
    assert set(points.served()) == expected(family)
    for row in points:
        if row.served:
            assert (row.proof, row.reason) == ("proven", ""), row
            assert row.how
            assert row.error < 1e-4
        else:
            assert row.reason, row


@ROUTES
def test_a_refusal_says_so_before_any_forward(family, attention):
    model = loaded(family, attention)
    for row in model.points():
        why = model.refuses(row.address)
        assert (why is None) == row.served
        if why is not None:
            assert str(row.address) in why
            assert row.reason in why
            with pytest.raises(locant.PointUnavailable, match="\\."):
                model.plan(row.address)


@ROUTES
def test_widths_are_what_is_captured(family, attention):
    model = loaded(family, attention)
    cache = model.capture(families.token_ids(), model.points().served())
    for address, tensor in cache.items():
        width = model.points()[address].width
        assert tensor.shape[:2] == (2, 9) if width else tensor.shape[2:] == (9, 9)
        assert width in (None, tensor.shape[-1]), address


# ---- what they hold


@ROUTES
@pytest.mark.parametrize("length", [9, 1, 2, 4, 16])
def test_every_point_is_what_the_weights_say(family, attention, length):
    model = loaded(family, attention)
    ids = families.token_ids(length=length, seed=length)
    wanted = Reference(model.hf)(ids)
    cache = model.capture(ids, model.points().served())
    assert {str(a) for a in cache} == set(wanted)
    for address, tensor in cache.items():
        assert_close(tensor, wanted[str(address)], address)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_the_batch_size_cannot_be_taken_for_another_axis(family, batch):
    model = loaded(family)
    ids = families.token_ids(batch=batch, length=5, seed=batch)
    wanted = Reference(model.hf)(ids)
    for address, tensor in model.capture(ids, model.points().served()).items():
        assert_close(tensor, wanted[str(address)], address)


@ROUTES
def test_a_point_captured_alone_is_the_point_captured_with_all_others(family, attention):
    model, ids = loaded(family, attention), families.token_ids()
    served = [a for a in model.points().served() if a.layer in (None, 1)]
    together = model.capture(ids, model.points().served())
    for address in served:
        assert torch.equal(model.capture(ids, address)[address], together[address]), address


@pytest.mark.parametrize("family", families.FAMILIES)
def test_indices_are_integers_and_everything_else_has_the_models_dtype(family):
    model = loaded(family)
    cache = model.capture(families.token_ids(), model.points().served())
    for address, tensor in cache.items():
        wanted = torch.int64 if address.name == "expert_indices" else torch.float32
        assert tensor.dtype == wanted, address


def test_the_reference_tells_wrong_tensors_apart():
    """What the tests above rest on: no two points of a block are the same numbers unless they must be."""
    for family in families.FAMILIES:
        tape = Reference(families.tiny(family))(families.token_ids())
        layer = [(k.split(".")[0], v) for k, v in tape.items() if k.endswith(".1")]
        alike = {
            frozenset((a, b))
            for i, (a, x) in enumerate(layer)
            for b, y in layer[i + 1 :]
            if x.shape == y.shape and errors(x, y)[0] < 1e-2
        }
        style = families.FAMILIES[family].cls
        allowed = {
            frozenset(pair)
            for pair in (
                ("attn_out", "attn_out_post"),
                ("mlp_out", "mlp_out_post"),
                ("query", "q_norm_in"),
                ("key", "k_norm_in"),
            )
        }
        if style.startswith("GPT2"):
            allowed |= {frozenset(("query", "query_rotated")), frozenset(("key", "key_rotated"))}
        if family in ("gptj", "cohere", "falcon"):
            allowed.add(frozenset(("attn_in", "mlp_in")))
        if family == "olmo2":
            allowed |= {frozenset(("resid_pre", "attn_in")), frozenset(("resid_mid", "mlp_in"))}
        assert alike <= allowed, (family, alike - allowed)


# ---- against what transformers gives


@ROUTES
def test_residuals_are_the_hidden_states(family, attention):
    model, ids = loaded(family, attention), families.token_ids()
    states = own_forward(model, ids, output_hidden_states=True).hidden_states
    cache = model.capture(
        ids, [("resid_pre", n) for n in LAYERS] + [("resid_post", n) for n in LAYERS] + ["final_norm"]
    )
    for layer in LAYERS:
        assert torch.equal(cache["resid_pre", layer], states[layer])
    for layer in LAYERS[:-1]:
        assert torch.equal(cache["resid_post", layer], states[layer + 1])
    assert torch.equal(cache["final_norm"], states[-1])


@pytest.mark.parametrize("family", families.FAMILIES)
def test_probabilities_are_the_attentions(family):
    model, ids = loaded(family, "eager"), families.token_ids()
    attentions = own_forward(model, ids, output_attentions=True).attentions
    cache = model.capture(ids, [("attn_probs", layer) for layer in LAYERS])
    for layer in LAYERS:
        assert_close(cache["attn_probs", layer], attentions[layer])


@ROUTES
@pytest.mark.parametrize(
    "addresses",
    [["resid_post.0"], ["attn_probs.1"], ["attn_scores.0", "attn_probs.2", "z.1"], ["query_rotated.1", "key.2"]],
    ids=", ".join,
)
def test_the_logits_of_a_captured_forward_have_the_models_own_bits(family, attention, addresses):
    model, ids = loaded(family, attention), families.token_ids()
    logits, cache = model.run_with_cache(ids, addresses)
    own = own_forward(model, ids).logits
    assert torch.equal(logits, own)
    assert [str(a) for a in cache] == addresses
    everything = model.capture(ids, model.points().served())
    assert torch.equal(everything["logits"], own)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_run_that_names_nothing_gives_everything(family):
    model, ids = loaded(family), families.token_ids()
    logits, cache = model.run_with_cache(ids)
    assert torch.equal(logits, own_forward(model, ids).logits)
    assert set(cache) == expected(family)
    for address, tensor in model.capture(ids, list(cache)).items():
        assert torch.equal(tensor, cache[address])


@ROUTES
def test_a_residual_unembeds_to_the_logits(family, attention):
    model, ids = loaded(family, attention), families.token_ids()
    cache = model.capture(ids, ["resid_post.2", "logits"])
    assert torch.equal(model.unembed(cache["resid_post.2"]), cache["logits"])


# ---- prompts of several lengths


@ROUTES
def test_a_prompt_in_a_ragged_batch_is_the_prompt_alone(family, attention):
    model = loaded(family, attention)
    prompts = [families.token_ids(1, n, seed=n)[0].tolist() for n in (4, 9, 1, 6)]
    served = model.points().served()
    cache = model.capture(prompts, served)
    for i, prompt in enumerate(prompts):
        wanted = Reference(model.hf)(torch.tensor([prompt]))
        own = cache.prompt(i)
        for address in served:
            assert_close(own[address], wanted[str(address)], f"{address} of prompt {i}")


@ROUTES
def test_positions_past_a_prompts_end_hold_no_number(family, attention):
    model = loaded(family, attention)
    cache = model.capture([[5, 6, 7], [8]], model.points().served())
    for address, tensor in cache.items():
        past = tensor[1, :, 1:] if tensor.dim() == 4 else tensor[1, 1:]
        inside = tensor[1, :, :1, :1] if tensor.dim() == 4 else tensor[1, :1]
        assert bool((past.isnan() if tensor.is_floating_point() else past == -1).all()), address
        assert not bool(inside.isnan().any()), address


# ---- half precision

IN_FLOAT32 = {"gptj": {"query_rotated", "key_rotated", "attn_scores"}, "mixtral": {"expert_weights"}}
"""What a family computes in float32, whatever the model's dtype."""


@ROUTES
def test_in_bfloat16_every_point_is_right_within_its_noise(family, attention):
    model, ids = loaded(family, attention, torch.bfloat16), families.token_ids()
    served = model.points().served()
    assert set(served) == expected(family)
    wanted = Reference(model.hf)(ids)
    cache = model.capture(ids, served)
    for address, tensor in cache.items():
        assert_close(tensor, wanted[str(address)], address, whole=3e-2, row=5e-2)
        own = address.name == "expert_indices" or address.name in IN_FLOAT32.get(family, ())
        own |= address.name == "attn_scores" and attention == "sdpa"  # a fused kernel sums in float32
        assert own or tensor.dtype == torch.bfloat16, address


@ROUTES
def test_in_bfloat16_what_transformers_gives_has_the_same_bits(family, attention):
    model, ids = loaded(family, attention, torch.bfloat16), families.token_ids()
    own = own_forward(model, ids, output_hidden_states=True)
    logits, cache = model.run_with_cache(ids, [("resid_pre", n) for n in LAYERS] + ["attn_probs.1"])
    assert torch.equal(logits, own.logits)
    for layer in LAYERS:
        assert torch.equal(cache["resid_pre", layer], own.hidden_states[layer])
