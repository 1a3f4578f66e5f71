"""What a capture gives: a mapping of tensors that knows its prompts, and survives a file."""

import copy

import pytest
import torch
from safetensors.torch import save_file

import families
import locant
from families import loaded, token_ids
from locant import Address, Cache
from tokenizing import TEXTS, words

NAMES = ["resid_post.1", "attn_probs.1", "attn_scores.0", "z.1", "value.1", "embeddings", "mlp_act.2"]
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


@pytest.fixture(scope="module")
def cache() -> Cache:
    return loaded("llama").capture(PROMPTS, NAMES)


def same(a: Cache, b: Cache) -> None:
    assert list(a) == list(b)
    for address, tensor in a.items():
        assert tensor.dtype == b[address].dtype
        assert torch.equal(tensor.nan_to_num(7), b[address].nan_to_num(7)), address
    assert (a.tokens, a.positions, a.origin) == (b.tokens, b.positions, b.origin)
    assert [heads(a, address) for address in a] == [heads(b, address) for address in b]


def heads(cache: Cache, address: Address) -> tuple[int, ...] | None:
    try:
        return tuple(cache.per_head(address).shape)
    except locant.CacheError:
        return None


# ---- a mapping


def test_an_address_a_string_and_a_pair_find_the_same_tensor(cache):
    for key in (Address("resid_post", 1), "resid_post.1", ("resid_post", 1), ("resid_post", 1, None)):
        assert cache[key] is cache["resid_post.1"]
        assert key in cache
    assert cache["embeddings"] is cache[Address("embeddings")] is cache["embeddings", None]


def test_it_is_a_mapping_in_the_order_asked_for(cache):
    assert [str(a) for a in cache] == NAMES
    assert len(cache) == len(NAMES)
    assert list(cache.keys()) == list(cache)
    assert dict(cache)[Address("z", 1)] is cache["z.1"]
    assert cache.get("z.2") is None
    for key in ("z.2", "resid_post.1\n", 5, None, ("z",)):
        assert key not in cache


def test_what_was_not_captured_is_told_with_what_was(cache):
    with pytest.raises(locant.CacheError, match=r"resid_post\.2 was not captured.*resid_post\.1") as caught:
        cache["resid_post.2"]
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, locant.LocantError)
    with pytest.raises(locant.AddressError):
        cache["resid_post"]


# ---- prompts


def test_a_prompt_has_its_own_positions_only(cache):
    assert cache.lengths == (5, 2, 3)
    for i, n in enumerate(cache.lengths):
        one = cache.prompt(i)
        assert one["resid_post.1"].shape == (1, n, families.WIDTH)
        assert one["attn_probs.1"].shape == (1, families.HEADS, n, n)
        assert one.tokens == (tuple(PROMPTS[i]),)
        assert one.lengths == (n,)
        assert not any(bool(t.isnan().any()) for t in one.values())
        assert torch.equal(one["z.1"], cache["z.1"][i : i + 1, :n])
    assert torch.equal(cache.prompt(-1)["z.1"], cache.prompt(2)["z.1"])


@pytest.mark.parametrize("index", [3, -4])
def test_a_prompt_that_is_not_there_is_refused(cache, index):
    with pytest.raises(locant.CacheError, match="3 prompts"):
        cache.prompt(index)


def test_the_mask_is_true_at_a_prompts_own_tokens(cache):
    assert cache.mask.tolist() == [[True] * n + [False] * (5 - n) for n in (5, 2, 3)]
    assert bool(cache["resid_post.1"][cache.mask].isfinite().all())
    assert bool(cache["resid_post.1"][~cache.mask].isnan().all())


def test_a_mean_over_padding_is_no_number(cache):
    mean = cache["resid_post.1"].mean(1)
    assert [bool(row.isnan().all()) for row in mean] == [False, True, True]
    alone = loaded("llama").capture(PROMPTS[1], "resid_post.1")["resid_post.1"].mean(1)
    assert torch.allclose(cache.prompt(1)["resid_post.1"].mean(1), alone, atol=1e-6)


def test_some_of_its_addresses(cache):
    two = cache.only(["z.1", ("resid_post", 1)])
    assert [str(a) for a in two] == ["z.1", "resid_post.1"]
    assert two["z.1"] is cache["z.1"]
    assert two.tokens == cache.tokens
    with pytest.raises(locant.CacheError):
        cache.only(["z.0"])


# ---- heads


def test_heads_are_told_apart_by_their_own_width(cache):
    facts = loaded("llama").facts
    assert facts.head_dim != facts.d_model // facts.n_heads
    z, value = cache.per_head("z.1"), cache.per_head("value.1")
    assert z.shape == (3, 5, facts.n_heads, facts.head_dim)
    assert value.shape == (3, 5, facts.n_kv_heads, facts.head_dim)
    assert torch.equal(z[0, :, 2], cache["z.1"][0, :, 2 * facts.head_dim : 3 * facts.head_dim])
    assert z.data_ptr() == cache["z.1"].data_ptr()
    assert cache.prompt(1).per_head("z.1").shape == (1, 2, facts.n_heads, facts.head_dim)


@pytest.mark.parametrize("name", ["resid_post.1", "embeddings", "mlp_act.2", "attn_probs.1"])
def test_a_point_without_heads_on_its_last_axis_is_refused_per_head(cache, name):
    with pytest.raises(locant.CacheError, match=r"no heads.*z\.1"):
        cache.per_head(name)


def test_heads_put_together_again_are_the_attentions_output():
    model = loaded("gemma3_text")
    cache = model.capture(token_ids(), ["z.1", "attn_out.1"])
    per = cache.per_head("z.1")
    w_o = model.hf.model.layers[1].self_attn.o_proj.weight.detach()
    d = model.facts.head_dim
    parts = [per[:, :, h] @ w_o[:, h * d : (h + 1) * d].T for h in range(model.facts.n_heads)]
    assert torch.allclose(sum(parts), cache["attn_out.1"], atol=1e-5)


# ---- positions


@pytest.mark.parametrize("positions", [0, 1, -1, -2, [0], [1, 0], [-1, 0, -2], (0, -1)])
def test_positions_kept_while_reading_are_those_taken_afterwards(positions):
    model = loaded("llama")
    whole = model.capture(PROMPTS, NAMES)
    some = model.capture(PROMPTS, NAMES, positions=positions)
    same(some, whole.at(positions))
    wanted = [positions] if isinstance(positions, int) else list(positions)
    assert some.positions == tuple(tuple(p % n for p in wanted) for n in (5, 2, 3))
    for i in range(3):
        rows = [whole.prompt(i)["resid_post.1"][0, p] for p in wanted]
        stacked = rows[0] if isinstance(positions, int) else torch.stack(rows)
        assert torch.equal(some["resid_post.1"][i], stacked)
    kept = () if isinstance(positions, int) else (len(wanted),)
    assert some["attn_probs.1"].shape == (3, families.HEADS, *kept, 5)
    assert some["value.1"].shape == (3, *kept, 32)


def test_a_prompt_of_a_cache_of_positions():
    cache = loaded("llama").capture(PROMPTS, NAMES, positions=[-1, 0])
    one = cache.prompt(1)
    assert one.positions == ((1, 0),)
    assert torch.equal(one["z.1"], cache["z.1"][1:2])
    assert one["attn_probs.1"].shape == (1, families.HEADS, 2, 2)
    single = loaded("llama").capture(PROMPTS, NAMES, positions=-1).prompt(2)
    assert single["z.1"].shape == (1, 64)
    assert single["attn_probs.1"].shape == (1, families.HEADS, 3)


def test_positions_are_copied_so_that_the_rest_can_be_freed():
    model = loaded("llama")
    whole = model.capture(token_ids(1, 60), "resid_post.1")
    for one in (model.capture(token_ids(1, 60), "resid_post.1", positions=-1), whole.at(-1)):
        assert one.nbytes == families.WIDTH * 4
        assert one.nbytes * 60 == whole.nbytes


def test_positions_of_positions_are_refused():
    cache = loaded("llama").capture(PROMPTS, NAMES, positions=[0, 1])
    with pytest.raises(locant.CacheError, match="already holds selected ones"):
        cache.at(0)


def test_a_position_no_prompt_has_is_refused(cache):
    with pytest.raises(locant.PromptError, match="position 2 of prompt 1"):
        cache.at(2)


# ---- on disk


@pytest.mark.parametrize("options", [{}, {"positions": -1}, {"positions": [0, -1]}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "gpt2"])
def test_a_file_gives_back_what_was_saved(tmp_path, family, options):
    model = locant.load_model(families.tiny(family), tokenizer=words())
    cache = model.capture(TEXTS, [*model.points().served(), *([] if options else ["lm_head"])], **options)
    path = cache.save(tmp_path / "capture.safetensors")
    back = Cache.load(path)
    same(cache, back)
    assert repr(back).splitlines()[1:] == repr(cache).splitlines()[1:]
    assert back.origin.proofs["resid_post.1"].startswith("proven")
    if not options:
        same(back.prompt(1), cache.prompt(1))


def test_bfloat16_survives_a_file(tmp_path):
    cache = loaded("llama", None, torch.bfloat16).capture(PROMPTS, NAMES)
    same(cache, Cache.load(cache.save(tmp_path / "a")))
    assert cache["z.1"].dtype == torch.bfloat16
    assert cache.origin.dtype == "bfloat16"


def test_views_and_gradients_are_saved_as_numbers(tmp_path):
    cache = loaded("llama").capture(token_ids(), ["value.1", "z.1", "attn_probs.0"], grad=True)
    turned = Cache({a: t.transpose(0, 1) for a, t in cache.items()}, [[1] * 2] * 9)
    assert not turned["value.1"].is_contiguous()
    for one in (cache, turned):
        back = Cache.load(one.save(tmp_path / "a"))
        for address, tensor in one.items():
            assert torch.equal(back[address], tensor.detach())


def test_tensors_that_are_the_same_memory_are_stored_once(tmp_path):
    cache = loaded("llama").capture(token_ids(), ["resid_post.0", "resid_pre.1", "attn_out.1", "attn_out_post.1"])
    both = cache.save(tmp_path / "both").stat().st_size
    one = cache.only(["resid_post.0", "attn_out.1"]).save(tmp_path / "one").stat().st_size
    assert both < one * 1.2
    back = Cache.load(tmp_path / "both")
    same(cache, back)


def test_a_part_of_a_tensor_is_saved_without_the_rest(tmp_path):
    cache = loaded("llama").capture([[5] * 60, [6]], "resid_post.1").prompt(1)
    assert cache.save(tmp_path / "one").stat().st_size < 4000
    same(cache, Cache.load(tmp_path / "one"))


def test_what_is_no_capture_is_refused(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    save_file({"a": torch.ones(2)}, tmp_path / "foreign")
    for name, says in (("text", "text"), ("foreign", "metadata"), ("missing", "missing")):
        with pytest.raises(locant.CacheError, match=says):
            Cache.load(tmp_path / name)


def test_saving_where_nothing_can_be_saved_says_so(tmp_path):
    cache = loaded("llama").capture(token_ids(), "resid_post.1")
    with pytest.raises((locant.CacheError, OSError)):
        cache.save(tmp_path / "no" / "such" / "folder" / "a")


# ---- what it says


def test_it_says_where_it_came_from():
    model = locant.load_model(families.tiny("llama"), tokenizer=words())
    cache = model.capture(TEXTS, ["resid_post.1", "model.layers.1.mlp"])
    origin = cache.origin
    assert origin.model == "LlamaForCausalLM"
    assert (origin.dtype, origin.attention) == ("float32", "sdpa")
    assert set(origin.versions) == {"locant", "torch", "transformers"}
    assert origin.proofs["resid_post.1"].startswith("proven (")
    assert origin.proofs["model.layers.1.mlp"] == "module output"


def test_its_text_lists_points_layers_shapes_and_sizes(cache):
    text = repr(cache)
    assert text.splitlines()[0].startswith("Cache: 3 prompts of 2-3, 5 tokens from LlamaForCausalLM")
    for part in ("resid_post", "3×5×48", "float32", "3×4×5×5"):
        assert part in text
    layers = loaded("llama").capture(
        token_ids(), [("resid_post", n) for n in (0, 1, 2)] + ["resid_pre.0", "resid_pre.2"]
    )
    assert "0-2" in repr(layers)
    assert "0, 2" in repr(layers)
    assert "1 prompt " in repr(loaded("llama").capture([5, 6], "z.0"))


def test_sizes_count_memory_once(cache):
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in cache.values()}.values())
    twice = loaded("llama").capture(token_ids(), ["resid_post.0", "resid_pre.1"])
    assert twice.nbytes == 2 * 9 * families.WIDTH * 4


def test_it_can_be_copied(cache):
    same(cache, copy.deepcopy(cache))
    assert copy.deepcopy(cache)["z.1"] is not cache["z.1"]


def test_captures_go_to_the_device_asked_for():
    cache = loaded("llama").capture(token_ids(), ["resid_post.1", "attn_probs.1"], device="cpu")
    assert {t.device.type for t in cache.values()} == {"cpu"}
