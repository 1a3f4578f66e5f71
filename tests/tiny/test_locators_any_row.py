"""Any rows of an index, against elements picked one by one from what Hugging Face's own modules return."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import loaded, tiny, token_ids
from locant import Index, LocatorError, ModelLocatorConfig

AXES = {
    "embed": ("position", "neuron"),
    "resid.pre": ("position", "neuron"),
    "attn.in": ("position", "neuron"),
    "attn.q": ("position", "head", "neuron"),
    "attn.k": ("position", "head", "neuron"),
    "attn.z": ("position", "head", "neuron"),
    "attn.pattern": ("head", "dest_pos", "src_pos"),
    "mlp.post": ("position", "neuron"),
    "mlp.out": ("position", "neuron"),
    "resid.post": ("position", "neuron"),
    "router_logits": ("position", "expert"),
    "logits": ("position", "neuron"),
}
MODULES = {
    "attn.in": ("self_attn", 0),
    "attn.q": ("self_attn.q_proj", 1),
    "attn.k": ("self_attn.k_proj", 1),
    "attn.z": ("self_attn.o_proj", 0),
    "mlp.post": ("mlp.down_proj", 0),
    "mlp.out": ("mlp", 1),
    "router_logits": ("mlp.gate", 1),
    "resid.pre": ("", 0),
    "resid.post": ("", 1),
}
"""The module of a Llama-like block that takes (0) or gives (1) an activation."""


def seen(family: str, ids: torch.Tensor) -> dict[tuple[str, int | None], torch.Tensor]:
    """What each activation is, heads apart: by hooks written here, and Hugging Face's own outputs."""
    hf = tiny(family, "eager")
    found: dict[tuple[str, int | None], torch.Tensor] = {}

    def keep(name: str, layer: int, side: int):
        def hook(_, args, kwargs, output):
            taken = args[0] if args else kwargs["hidden_states"]
            given = output[0] if isinstance(output, tuple) else output
            tensor = (taken, given)[side].detach().reshape(*ids.shape, -1)
            heads = {"attn.q": 4, "attn.z": 4, "attn.k": 2}.get(name)
            found[name, layer] = tensor if heads is None else tensor.unflatten(-1, (heads, -1))

        return hook

    hooks = []
    for layer, block in enumerate(hf.model.layers):
        for name, (path, side) in MODULES.items():
            parts = dict(block.named_modules())
            if path in parts and (name != "router_logits" or isinstance(parts[path], torch.nn.Module)):
                hooks.append(parts[path].register_forward_hook(keep(name, layer, side), with_kwargs=True))
    with torch.no_grad():
        out = hf(input_ids=ids, use_cache=False, output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    found["embed", None] = out.hidden_states[0]
    found["logits", None] = out.logits
    for layer, pattern in enumerate(out.attentions):
        found["attn.pattern", layer] = pattern
    return found


IDS = token_ids(2, 5)
LLAMA = seen("llama", IDS)


def by_hand(tensor: torch.Tensor, axes: tuple[str, ...], row: dict) -> torch.Tensor:
    """One element after the other, in the order of the row's lists."""
    ranges = [range(size) for size in tensor.shape[1:]]
    picked = [row.get(f"source_{axis}", every) for axis, every in zip(axes, ranges, strict=True)]
    lists = [[cell] if isinstance(cell, int) else list(cell) for cell in picked]
    shape = [len(cells) for cells, cell in zip(lists, picked, strict=True) if not isinstance(cell, int)]
    flat = [tensor[(slice(None), *place)] for place in itertools.product(*lists)]
    return torch.stack(flat, 1).reshape(len(tensor), *shape)


def resolved(fields: dict, model, n_positions=5) -> Index:
    locator = ModelLocatorConfig.from_config(fields)
    return Index(locator, locator.parse(model, n_positions))


@st.composite
def rows(draw: st.DrawFn) -> tuple[str, list[dict]]:
    """Some rows of one activation: ints and lists on some of its axes."""
    activation = draw(st.sampled_from(sorted({name for name, _ in LLAMA} & AXES.keys())))
    some = next(tensor for (name, _), tensor in LLAMA.items() if name == activation)
    named = draw(st.lists(st.sampled_from(AXES[activation]), unique=True))
    sizes = dict(zip(AXES[activation], some.shape[1:], strict=True))

    def cell(axis: str):
        values = st.integers(0, min(sizes[axis], 40) - 1)
        return values | st.lists(values, min_size=1, max_size=4, unique=True) | values.map(lambda n: n - sizes[axis])

    fields = {axis: cell(axis) for axis in named}
    if activation not in ("embed", "logits"):
        fields = {"layer": st.integers(0, 2)} | fields
    if not fields:
        fields = {"position": cell("position")}
    return activation, draw(st.lists(st.fixed_dictionaries(fields), min_size=1, max_size=4))


@settings(max_examples=200)
@given(rows())
def test_rows_read_what_slices_of_the_modules_own_tensors_are(case):
    activation, coordinates = case
    model = loaded("llama", "eager")
    index = resolved({"activation": activation, "coordinates": coordinates}, model)
    blocks = index.read(model.capture(IDS.tolist(), index.addresses))
    expected = [by_hand(LLAMA[activation, row.get("source_layer")], AXES[activation], dict(row)) for row in index]
    assert len(blocks) == len(index) == len(expected)
    for block, hand in zip(blocks, expected, strict=True):
        assert block.shape == hand.shape
        torch.testing.assert_close(block, hand, rtol=1e-4, atol=1e-5)
    if len({tuple(hand.shape) for hand in expected}) == 1:
        torch.testing.assert_close(blocks.stack(), torch.stack(expected), rtol=1e-4, atol=1e-5)
    else:
        with pytest.raises(LocatorError, match="different shapes"):
            blocks.stack()


def test_the_chosen_experts_are_read_by_rank():
    model, hand = loaded("qwen3_moe", "eager"), seen("qwen3_moe", IDS)
    index = resolved({"activation": "router_logits", "location": ["layer", "expert"], "filter": [{"layer": 0}]}, model)
    blocks = index.read(model.capture(IDS.tolist(), index.addresses))
    ids = model.capture(IDS.tolist(), ["expert_indices.0"])["expert_indices.0"]
    torch.testing.assert_close(blocks.stack().movedim(0, -1), hand["router_logits", 0])
    best = resolved({"activation": "expert_indices.0", "location": ["expert"], "filter": [{"expert": 0}]}, model)
    torch.testing.assert_close(
        best.read(model.capture(IDS.tolist(), best.addresses))[0], hand["router_logits", 0].argmax(-1)
    )
    assert ids.shape[-1] == 2
    with pytest.raises(LocatorError, match="filter on layer"):
        resolved({"activation": "router_logits", "location": ["layer"]}, model)


# ---- prompts of different lengths

PROMPTS = [IDS[0, :5].tolist(), IDS[1, :3].tolist()]


def alone(activation: str, layer: int | None) -> list[torch.Tensor]:
    """The activation of each prompt run by itself."""
    return [seen("llama", torch.tensor([ids]))[activation, layer][0] for ids in PROMPTS]


def test_an_axis_read_whole_keeps_the_padding_of_the_capture():
    model = loaded("llama", "eager")
    index = resolved({"activation": "resid_post.1"}, model, None)
    block = index.read(model.capture(PROMPTS, index.addresses))[0]
    assert block.shape == (2, 5, model.facts.d_model)
    assert block[1, 3:].isnan().all()
    torch.testing.assert_close(block[1, :3], alone("resid.post", 1)[1], rtol=1e-4, atol=1e-5)


# ---- views


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("activation", "cells", "view"),
    [
        ("resid_post.1", {"position": 2}, True),
        ("resid_post.1", {"position": [1, 2, 3], "neuron": 5}, True),
        ("resid_post.1", {"position": [0, 2, 4]}, True),
        ("z.1", {"head": [0, 1], "position": -1}, True),
        ("attn_probs.1", {"head": [0, 2], "dest_pos": [3], "src_pos": [0, 1]}, True),
        ("resid_post.1", {"position": [0, 1, 3]}, False),
        ("resid_post.1", {"position": [3, 1]}, False),
    ],
)
def test_a_row_is_a_view_where_its_values_lie_evenly(activation, cells, view):
    model = loaded("llama", "eager")
    index = resolved({"activation": activation, "coordinates": [cells]}, model)
    cache = model.capture(IDS.tolist(), index.addresses)
    assert (address(index.read(cache)[0]) == address(cache[activation])) is view
    # Writing into a view changes the entries that the row names, and no others.
    if view:
        before = cache[activation].clone()
        index.read(cache)[0][:] = 7.0
        changed = (cache[activation] != before).sum()
        assert changed == index.read(cache)[0].numel()
        assert (index.read(cache)[0] == 7.0).all()


def test_settling_a_locator_runs_nothing_and_needs_facts_only():
    model = loaded("llama")
    fields = {"activation": "attn.k", "location": ["layer", "head", "position"]}
    assert list(resolved(fields, model)) == list(resolved(fields, model.facts))
    assert len(resolved(fields, model)) == 3 * 2 * 5
