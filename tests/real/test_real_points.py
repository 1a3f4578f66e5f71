"""Every point of two real models, against their weights and against what transformers gives."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import locant
from comparing import assert_close, errors
from locant import Address
from reference import Reference

TEXT = "The capital of France is Paris, and the capital of Italy is"


def ids_of(model: locant.EagerModel) -> torch.Tensor:
    return torch.tensor(model.tokens(TEXT))


@contextmanager
def attention(model: locant.EagerModel, implementation: str) -> Iterator[None]:
    before = model.hf.config._attn_implementation
    model.hf.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.hf.set_attn_implementation(before)


def chosen_layers(model: locant.EagerModel) -> tuple[int, int, int]:
    n = model.facts.n_layers
    return 1, n // 2, n - 1


@pytest.fixture(scope="module")
def tapes() -> dict[str, dict[str, torch.Tensor]]:
    return {}


def tape(model: locant.EagerModel, tapes: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if model.name not in tapes:
        tapes[model.name] = Reference(model.hf)(ids_of(model))
    return tapes[model.name]


def test_every_point_of_every_layer_is_proven(model):
    points = model.points()
    names = {address.name for address in points.served()}
    gemma = {"q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"}
    lacking = {"attn_gate", "router_logits", "expert_weights", "expert_indices"}
    lacking |= {name for name, point in locant.POINTS.items() if point.needs == "streams"}
    lacking |= set() if names >= gemma else gemma
    assert set(locant.POINTS) - names == lacking
    assert (names >= gemma) == (model.facts.n_heads == 4)
    for row in points:
        assert row.served == (row.address.name not in lacking), row
        assert not row.served or (row.proof == "proven" and row.error < 1e-4)
    per_layer = len(names) - 4
    assert len(points.served()) == 4 + per_layer * model.facts.n_layers


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_point_is_what_the_weights_say(model, tapes, implementation):
    wanted = tape(model, tapes)
    asked = [a for a in model.points().served() if a.layer in (None, *chosen_layers(model))]
    with attention(model, implementation):
        cache = model.capture(ids_of(model), asked)
    assert cache.origin.attention == implementation
    for address, tensor in cache.items():
        assert_close(tensor, wanted[str(address)], address, row=1e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_logits_have_the_models_own_bits(model, implementation):
    with attention(model, implementation), torch.no_grad():
        asked = [Address(name, layer) for layer in chosen_layers(model) for name in ("attn_probs", "attn_scores", "z")]
        logits = model.run_with_cache(ids_of(model), asked)[0]
        own = model.hf(ids_of(model), use_cache=False, output_hidden_states=True)
        assert torch.equal(logits, own.logits)
        residuals = model.capture(ids_of(model), [("resid_pre", n) for n in range(model.facts.n_layers)])
        for layer in range(model.facts.n_layers):
            assert torch.equal(residuals["resid_pre", layer], own.hidden_states[layer])


def test_probabilities_are_the_attentions_of_transformers(model):
    asked = [("attn_probs", n) for n in range(model.facts.n_layers)]
    fused = model.capture(ids_of(model), asked)
    with attention(model, "eager"), torch.no_grad():
        attentions = model.hf(ids_of(model), use_cache=False, output_attentions=True).attentions
    for layer, wanted in enumerate(attentions):
        assert_close(fused["attn_probs", layer], wanted, whole=2e-5, row=1e-3)


def test_the_last_residual_is_not_normed_and_the_last_hidden_state_is(model, tapes):
    last = f"resid_post.{model.facts.n_layers - 1}"
    cache = model.capture(ids_of(model), [last, "final_norm"])
    with torch.no_grad():
        state = model.hf(ids_of(model), use_cache=False, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(cache["final_norm"], state)
    assert_close(cache[last], tape(model, tapes)[last])
    assert errors(cache[last], state)[0] > 0.1


def test_a_residual_unembeds_to_the_logits(model):
    last = f"resid_post.{model.facts.n_layers - 1}"
    cache = model.capture(ids_of(model), [last, "logits"])
    assert torch.equal(model.unembed(cache[last]), cache["logits"])
    assert model.tokenizer.decode(cache["logits"][0, -1].argmax()).strip() in ("Rome", "Paris")
