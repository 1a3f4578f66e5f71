"""Captures inside captures, models that change after they were examined, and buffers a module hands out."""

import pytest
import torch

import families
import locant
from families import token_ids


def test_a_capture_inside_a_hook_of_a_capture_reads_its_own_forward():
    model = locant.load_model(families.fresh("llama"))
    outer, inner = token_ids(seed=1), token_ids(seed=2)
    wanted = model.capture(outer, ["resid_post.0", "resid_post.2", "attn_probs.1"])
    alone = model.capture(inner, ["resid_post.0", "resid_post.1"])
    seen: list[locant.Cache] = []
    entered: list[bool] = []

    def nested(*_: object) -> None:
        if not entered:
            entered.append(True)
            seen.append(model.capture(inner, ["resid_post.0", "resid_post.1"]))

    hook = model.hf.model.layers[1].register_forward_hook(nested)
    got = model.capture(outer, list(wanted))
    hook.remove()
    for cache, expected in ((got, wanted), (seen[0], alone)):
        for address, tensor in cache.items():
            assert torch.equal(tensor, expected[address]), address


def test_a_module_put_in_place_of_another_is_the_one_that_is_read():
    model = locant.load_model(families.fresh("llama"))
    model.capture(token_ids(), "mlp_out.1")
    old = model.hf.model.layers[1].mlp.down_proj
    new = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    model.hf.model.layers[1].mlp.down_proj = new
    seen: list[torch.Tensor] = []
    hook = new.register_forward_hook(lambda _, __, out: seen.append(out))
    got = model.capture(token_ids(), "mlp_out.1")["mlp_out.1"]
    hook.remove()
    assert torch.equal(got, seen[-1])


def test_a_module_that_no_longer_runs_is_said_so_and_examining_again_helps():
    model = locant.load_model(families.fresh("llama"))

    class Wrapped(torch.nn.Module):
        def __init__(self, kept: torch.nn.Module) -> None:
            super().__init__()
            self.kept = kept
            self.weight = kept.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.kept(x)

    block = model.hf.model.layers[1]
    original = block.forward
    block.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(locant.PointUnavailable, match="examine"):
        model.capture(token_ids(), "mlp_out.1")
    block.forward = original
    block.mlp.down_proj = Wrapped(block.mlp.down_proj)
    model.examine()
    assert model.refuses("mlp_act.1") is None
    assert model.refuses("resid_post.1") is None


def test_padding_is_never_written_into_a_buffer_of_the_model():
    hf = families.fresh("llama")

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2, 3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table[:, : x.shape[1]]

    hf.model.layers[1].mlp.table = Table()
    forward = hf.model.layers[1].mlp.forward
    hf.model.layers[1].mlp.forward = lambda x: forward(x) + 0 * hf.model.layers[1].mlp.table(x).sum()
    model = locant.load_model(hf)
    model.capture([[5, 6, 7], [8, 9]], "model.layers.1.mlp.table")
    assert torch.equal(hf.model.layers[1].mlp.table.table, torch.ones(2, 3, 4))
