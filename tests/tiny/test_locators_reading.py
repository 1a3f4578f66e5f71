"""What the rows of an index read, against tensors that plain hooks and slices give."""

import pytest
import torch
from torch import Tensor

import families
from locant import Address, Facts, Index, LocatorError, ModelLocatorConfig

LENGTH = 9


def index(config, model, n_positions=LENGTH) -> Index:
    locator = ModelLocatorConfig.from_config(config)
    return Index(locator, locator.parse(model, n_positions))


def by_hooks(name: str, ids: Tensor) -> dict[str, Tensor]:
    """Layer 1 of a llama-like model: outputs of its modules, and the attention pattern as the model returns it."""
    hf = families.fresh(name, "eager")
    block = hf.model.layers[1]
    seen: dict[str, Tensor] = {}
    hooks = [
        block.register_forward_hook(lambda _, __, out: seen.update(resid=out[0] if isinstance(out, tuple) else out)),
        block.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.update(z=args[0])),
        block.self_attn.k_proj.register_forward_hook(lambda _, __, out: seen.update(key=out)),
        block.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.update(act=args[0])),
    ]
    with torch.no_grad():
        out = hf(input_ids=ids, output_attentions=True)
    for hook in hooks:
        hook.remove()
    batch, length = ids.shape
    seen["z"] = seen["z"].reshape(batch, length, families.HEADS, 16)
    seen["key"] = seen["key"].reshape(batch, length, families.KV_HEADS, 16)
    return seen | {"pattern": out.attentions[1]}


@pytest.fixture(scope="module")
def llama():
    ids = families.token_ids(2, LENGTH)
    return families.loaded("llama", "eager"), ids, by_hooks("llama", ids)


def read(llama, config, n_positions=LENGTH):
    model, ids, _ = llama
    made = index(config, model, n_positions)
    return made.read(model.capture(ids, made.addresses))


AT = {"layer": 1}
ROWS = [
    ("resid.post", {"position": -1}, lambda t: t["resid"][:, 8]),
    ("resid.post", {}, lambda t: t["resid"]),
    ("resid.post", {"position": [2, 5], "neuron": [7, 1, 3]}, lambda t: t["resid"][:, [2, 5]][:, :, [7, 1, 3]]),
    ("resid.post", {"neuron": -1}, lambda t: t["resid"][:, :, 47]),
    ("attn.z", {"head": 2}, lambda t: t["z"][:, :, 2]),
    ("attn.z", {"head": [3, 0], "position": 4}, lambda t: t["z"][:, 4][:, [3, 0]]),
    ("attn.z", {"head": [1]}, lambda t: t["z"][:, :, [1]]),
    ("attn.k", {"head": -1, "position": [0, 8]}, lambda t: t["key"][:, [0, 8], 1]),
    ("attn.pattern", {"head": 1, "dest_pos": 5, "src_pos": 2}, lambda t: t["pattern"][:, 1, 5, 2]),
    ("attn.pattern", {"head": 1, "dest_pos": [4, 5], "src_pos": [1, 4]},
     lambda t: t["pattern"][:, 1][:, [4, 5]][:, :, [1, 4]]),
    ("attn.pattern", {"head": [2, 3], "src_pos": [1, 4]}, lambda t: t["pattern"][:, [2, 3]][:, :, :, [1, 4]]),
    ("mlp.post", {"position": 3, "neuron": [0, 2, 4]}, lambda t: t["act"][:, 3, [0, 2, 4]]),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "at", "value"), ROWS)
def test_a_row_reads_what_slicing_a_hooked_tensor_gives(llama, activation, at, value):
    [block] = read(llama, {"activation": activation, "coordinates": [AT | at]})
    assert block.equal(value(llama[2]))


def test_a_row_is_a_view_where_values_lie_evenly(llama):
    model, ids, _ = llama
    for neurons, a_view in (([0, 2, 4], True), ([5], True), (3, True), ([0, 2, 5], False), ([4, 2, 0], False)):
        made = index({"activation": "mlp.post", "coordinates": [AT | {"neuron": neurons}]}, model)
        cache = model.capture(ids, made.addresses)
        tensor = cache["mlp_act.1"]
        [block] = made.read(cache)
        assert (block.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()) is a_view, neurons


def test_stacked_rows_are_the_rows_in_their_order(llama):
    model, ids, right = llama
    config = {"activation": "attn.z", "location": ["head", "layer", "position"], "filter": [{"layer": [0, 1]}]}
    made = index(config, model)
    blocks = made.read(model.capture(ids, made.addresses))
    stacked = blocks.stack()
    assert tuple(stacked.shape) == (4 * 2 * LENGTH, 2, 16)
    for row, block, at in zip(made, blocks, stacked, strict=True):
        assert block.equal(at)
        if row["source_layer"] == 1:
            assert at.equal(right["z"][:, row["source_position"], row["source_head"]])


def test_rows_of_several_activations_are_stacked_in_their_order(llama):
    rows = [{"activation": "mlp.out", "layer": 2, "position": 3}, {"activation": "resid_post.1", "position": 0}]
    rows[1] = {"activation": "resid.post", "layer": 1, "position": 0}
    blocks = read(llama, {"coordinates": [*rows, rows[0]]})
    assert blocks.stack().equal(torch.stack([blocks[0], llama[2]["resid"][:, 0], blocks[0]]))


def test_lists_of_one_length_are_stacked_and_others_are_refused(llama):
    heads = {"activation": "attn.z", "location": ["layer", "head"], "filter": [AT]}
    pairs = read(llama, heads | {"group": {"head": [0, 2]}, "combination": {"location": ["head"], "max_elements": 1}})
    assert pairs.stack().equal(llama[2]["z"].movedim(2, 0)[[0, 2, 1, 3]].unsqueeze(3))
    with pytest.raises(LocatorError, match="different shapes"):
        read(llama, heads | {"group": {"head": [0, 2]}}).stack()


def test_prompts_of_different_lengths_are_counted_each_from_its_end(llama):
    model, ids, _ = llama
    prompts = [ids[0].tolist(), ids[1, :5].tolist()]
    alone = [by_hooks("llama", torch.tensor([prompt])) for prompt in prompts]
    rows = [{"position": -1}, {"position": 1}, {"position": [0, -2]}]
    for lengths in (None, [9, 5]):
        made = index({"activation": "resid.post", "coordinates": [AT | row for row in rows]}, model, lengths)
        blocks = made.read(model.capture(prompts, made.addresses))
        for block, positions in zip(blocks, ([[8], [4]], [[1], [1]], [[0, 7], [0, 3]]), strict=True):
            right = torch.stack([t["resid"][0, p] for t, p in zip(alone, positions, strict=True)])
            torch.testing.assert_close(block, right.squeeze(1), rtol=1e-5, atol=1e-5)
    made = index({"activation": "attn.pattern", "coordinates": [AT | {"head": 0, "dest_pos": -1, "src_pos": -2}]},
                 model, None)  # fmt: skip
    [block] = made.read(model.capture(prompts, made.addresses))
    right = torch.stack([t["pattern"][0, 0, -1, -2] for t in alone])
    torch.testing.assert_close(block, right, rtol=1e-5, atol=1e-6)


def test_a_capture_the_index_was_not_made_for_is_refused(llama):
    model, ids, _ = llama
    config = {"activation": "resid.post", "coordinates": [AT | {"position": -1}]}
    made = index(config, model)
    with pytest.raises(LocatorError, match=r"prompts of 5 tokens. the index was made for 9 tokens"):
        made.read(model.capture(ids[:, :5], made.addresses))
    with pytest.raises(LocatorError, match=r"resid_post.1: a row reads it, and it was not captured"):
        made.read(model.capture(ids, "resid_post.0"))
    with pytest.raises(LocatorError, match="a capture of some positions"):
        made.read(model.capture(ids, made.addresses, positions=[0, 3]))
    far = index({"activation": "resid.post", "coordinates": [AT | {"position": 7}]}, model, None)
    with pytest.raises(LocatorError, match=r"position 7. the shortest prompt has 5 tokens"):
        far.read(model.capture([ids[0].tolist(), ids[1, :5].tolist()], far.addresses))
    both = index({"activation": "resid.post", "coordinates": [AT | {"position": [2, -3]}]}, model, None)
    with pytest.raises(LocatorError, match=r"2 and -3 are one token"):
        both.read(model.capture(ids[:, :5], both.addresses))
    wrong = Facts.from_dict({"n_layers": 3, "n_heads": 4, "head_dim": 12})
    other = index({"activation": "attn.z", "coordinates": [AT | {"head": 0, "neuron": -1}]}, wrong)
    with pytest.raises(LocatorError, match=r"its neuron axis has 16 values. the index took it for 12"):
        other.read(model.capture(ids, other.addresses))


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_every_float_point_a_model_serves_can_be_located_whole_and_at_its_last_token(name):
    model, ids = families.loaded(name), families.token_ids(2, LENGTH)
    for address in model.points().served():
        cache = model.capture(ids, address)
        [whole] = index({"activation": str(address)}, model).read(cache)
        raw = cache[address]
        assert whole.reshape(raw.shape).equal(raw)
        matrix = address.name in ("attn_scores", "attn_probs")
        axis, place = ("dest_pos", 2) if matrix else ("position", 1)
        [last] = index({"activation": str(address), "location": [axis], "filter": [{axis: -1}]}, model).read(cache)
        right = raw.select(place, LENGTH - 1)
        assert last.reshape(right.shape).equal(right)


def test_what_a_model_does_not_serve_is_refused_before_any_forward():
    model = families.loaded("gptj")
    with pytest.raises(LocatorError, match=r"resid.mid in layer 0"):
        index({"activation": "resid.mid", "location": ["layer"]}, model)
    mixed = families.loaded("qwen3_moe")
    with pytest.raises(LocatorError, match=r"router_logits in layer 1.*layers 0, 2 have it") as caught:
        index({"activation": "router_logits", "location": ["layer", "expert"]}, mixed)
    assert "filter" in str(caught.value)
    kept = index({"activation": "router_logits", "location": ["layer", "expert"], "filter": [{"layer": [0, 2]}]}, mixed)
    assert len(kept) == 2 * 5
    assert kept.addresses == [Address("router_logits", 0), Address("router_logits", 2)]
