"""A model whose classes, modules, parameters and arguments have names that mean nothing is served as it was before."""

import pytest
import torch
from torch import nn

import families
from comparing import assert_close
from families import fresh, token_ids
from locant import EagerModel
from reference import Reference
from renaming import renamed

FAMILIES = "llama qwen2 gemma2 gemma3_text olmo2 phi3 mixtral qwen3_moe granite cohere".split()
TORCH = {"weight", "bias"}
"""What the linear maps and embeddings of torch itself call their parameters."""


@pytest.fixture(scope="module", params=[(f, a) for f in FAMILIES for a in families.attentions(f)], ids="-".join)
def models(request, tmp_path_factory):
    original = fresh(*request.param)
    return original, renamed(original, tmp_path_factory.mktemp("renamed"))


@pytest.fixture(scope="module")
def surveyed(models):
    return tuple(map(EagerModel, models))


def own_names(model: nn.Module) -> set[str]:
    parts = {part for name in model.state_dict() for part in name.split(".") if not part.isdigit()}
    classes = {
        type(m).__name__ for m in model.modules() if not type(m).__module__.startswith(("torch", "transformers."))
    }
    classes |= {type(m).__name__ for m in model.modules() if ".models." in type(m).__module__}
    return (parts | classes) - TORCH


def test_it_is_the_same_model_and_no_name_is_left(models):
    original, other = models
    assert min(len(own_names(original)), len(own_names(other))) > 15
    assert not own_names(other) & own_names(original)
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(other(ids, use_cache=False).logits, original(ids, use_cache=False).logits)


def test_the_same_points_are_found_and_proven(surveyed):
    original, other = ({p.address: (p.served, p.proof, p.width) for p in model.points()} for model in surveyed)
    assert other == original
    assert sum(served for served, *_ in other.values()) > 60


def test_the_same_sizes_are_found(surveyed):
    original, other = (model.facts.to_dict() for model in surveyed)
    # how many positions a model is made for stands in its config alone, under a name
    assert other == {name: size for name, size in original.items() if name != "n_ctx"}


def test_every_point_is_what_the_weights_say(models, surveyed):
    ids = token_ids(seed=3)
    wanted = Reference(models[0])(ids)
    cache = surveyed[1].capture(ids, surveyed[1].points().served())
    assert {str(address) for address in cache} == set(wanted)
    for address, tensor in cache.items():
        assert_close(tensor, wanted[str(address)], address)


def test_a_model_whose_embedding_transformers_does_not_know_is_served(monkeypatch):
    model = fresh("llama")
    known = [(p.address, p.proof) for p in EagerModel(model).points()]

    def unknown(self):
        raise NotImplementedError("please override in the subclass")

    monkeypatch.setattr(type(model), "get_input_embeddings", unknown)
    assert [(p.address, p.proof) for p in EagerModel(model).points()] == known
