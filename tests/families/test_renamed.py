"""Names do not matter: a family whose classes and attributes are called anything is surveyed and proven alike."""

import re

import pytest
import torch

from locant import EagerModel
from zoo import build
from zoo.renamed import renamed

TELLING = re.compile("attn|attention|mlp|norm|embed|proj|expert|gate|router|layer|head|llama|gemma|qwen")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "qwen3_next", "gpt2", "falcon"])
def test_a_family_under_meaningless_names_has_the_same_points_with_the_same_values(family, tmp_path):
    model = build(family)
    model.set_experts_implementation("eager")
    known, twin = EagerModel(model), renamed(model, tmp_path)
    telling = [path for path, _ in twin.named_modules() if TELLING.search(path)]
    assert not telling, "these names were not replaced"
    assert not TELLING.search(type(twin).__name__.lower())

    unknown = EagerModel(twin)
    assert [(s.address, s.proof, s.reason) for s in unknown.points()] == [
        (s.address, s.proof, s.reason) for s in known.points()
    ]
    ids = torch.randint(5, 120, (2, 9), generator=torch.Generator().manual_seed(1))
    served = known.points().served()
    there, here = unknown.capture(ids, served), known.capture(ids, served)
    for address in served:
        assert torch.equal(there[address], here[address]), address
