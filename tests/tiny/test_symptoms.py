"""Bugs that interpretability tools have had, by their symptom. Each test can tell the symptom from the right value."""

import pytest
import torch
from safetensors.torch import save_file

import families
import locant
from comparing import assert_close, errors
from families import loaded, token_ids
from reference import Reference
from tokenizing import TEXTS, words


def far(wrong: torch.Tensor, right: torch.Tensor) -> bool:
    return errors(wrong, right)[0] > 1e-2


def by_hand(family: str, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    return Reference(families.tiny(family))(token_ids() if ids is None else ids)


# ---- padding and positions


def test_left_padding_shifts_the_positions_of_a_short_prompt():
    hf = families.tiny("gpt2")
    ids, short = token_ids(1, 9, seed=1)[0].tolist(), token_ids(1, 4, seed=2)[0].tolist()
    padded = torch.tensor([ids, [0] * 5 + short])
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    with torch.no_grad():
        states = hf(padded, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
    right = by_hand("gpt2", torch.tensor([short]))["resid_post.0"]
    assert far(states[1][1:, 5:], right)
    assert_close(loaded("gpt2").capture([ids, short], "resid_post.0").prompt(1)["resid_post.0"], right)


def test_a_position_lands_on_padding_in_a_short_prompt():
    m = locant.load_model(families.tiny("llama"), tokenizer=words(padding_side="left"))
    for position in (0, 1, -2, -1):
        row = m.capture(TEXTS, "resid_post.1", positions=position, prepend_bos=True)["resid_post.1"]
        for i, ids in enumerate(m.tokens(TEXTS)):
            assert_close(row[i], by_hand("llama", torch.tensor([ids]))["resid_post.1"][0, position])


def test_a_mask_made_from_the_padding_id_hides_real_tokens():
    m = locant.load_model(families.tiny("llama"), tokenizer=words(pad="<eos>", adds="$A <eos>"))
    cache = m.capture(["the cat <eos> sat", "hello"], "resid_post.2")
    for i, ids in enumerate(cache.tokens):
        assert ids.count(m.tokenizer.pad_token_id) >= 1
        assert_close(cache.prompt(i)["resid_post.2"], by_hand("llama", torch.tensor([ids]))["resid_post.2"])


def test_a_tokenizer_without_a_padding_token_cannot_batch():
    tokenizer = words(pad=None)
    with pytest.raises(ValueError, match="pad"):
        tokenizer(TEXTS, padding=True)
    m = locant.load_model(families.tiny("llama"), tokenizer=tokenizer)
    cache = m.capture(TEXTS, "resid_post.0")
    assert m.hf.get_input_embeddings().weight.shape[0] == families.VOCABULARY
    assert tokenizer.pad_token is None
    for i, ids in enumerate(cache.tokens):
        assert_close(cache.prompt(i)["resid_post.0"], by_hand("llama", torch.tensor([ids]))["resid_post.0"])


def test_one_position_of_one_prompt_squeezes_the_wrong_axis():
    m, ids = loaded("llama"), token_ids(3)
    whole = m.capture(ids, "resid_post.1")["resid_post.1"]
    assert torch.equal(m.capture(ids, "resid_post.1", positions=4)["resid_post.1"], whole[:, 4])
    assert torch.equal(m.capture(ids, "resid_post.1", positions=[4])["resid_post.1"], whole[:, 4:5])
    assert torch.equal(m.capture(ids[:1], "resid_post.1", positions=4)["resid_post.1"], whole[:1, 4])
    assert torch.equal(m.capture(ids[0], "resid_post.1", positions=[4])["resid_post.1"], whole[:1, 4:5])


# ---- indices of the residual stream


def test_the_last_hidden_state_is_taken_for_the_last_residual():
    m = loaded("llama")
    with torch.no_grad():
        state = m.hf(token_ids(), use_cache=False, output_hidden_states=True).hidden_states[-1]
    cache = m.capture(token_ids(), ["resid_post.2", "final_norm"])
    assert far(state, cache["resid_post.2"])
    assert_close(cache["resid_post.2"], by_hand("llama")["resid_post.2"])
    assert torch.equal(state, cache["final_norm"])


@pytest.mark.parametrize("layer", [-1, -3, 3])
def test_a_negative_layer_counts_from_the_wrong_end(layer):
    m = loaded("llama")
    with pytest.raises(locant.LocantError):
        m.capture(token_ids(), ("resid_post", layer))
    assert m.refuses(("resid_post", layer))


@pytest.mark.parametrize("family", ["gpt2", "granite"])
def test_embeddings_are_taken_for_the_first_residual(family):
    cache = loaded(family).capture(token_ids(), ["embeddings", "resid_pre.0"])
    tape = by_hand(family)
    assert far(tape["embeddings"], tape["resid_pre.0"])
    for name in ("embeddings", "resid_pre.0"):
        assert_close(cache[name], tape[name])


def test_the_scale_of_embeddings_is_not_rounded_as_the_model_rounds_it():
    m = loaded("gemma3_text", None, torch.bfloat16)
    table = m.hf.get_input_embeddings().weight.detach()
    scale = families.WIDTH**0.5
    right = table[token_ids()] * torch.tensor(scale).to(torch.bfloat16)
    wrong = (table[token_ids()].float() * scale).to(torch.bfloat16)
    assert not torch.equal(right, wrong)
    cache = m.capture(token_ids(), ["embeddings", "resid_pre.0"])
    assert torch.equal(cache["embeddings"], right)
    assert torch.equal(cache["resid_pre.0"], right)


# ---- what a point means in one family


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2"])
def test_a_sublayers_output_before_its_norm_is_taken_for_what_it_adds(family):
    names = [f"{n}.1" for n in "resid_pre attn_out attn_out_post resid_mid mlp_out mlp_out_post resid_post".split()]
    cache = loaded(family).capture(token_ids(), names)
    before, attn, attn_post, middle, mlp, mlp_post, after = cache.values()
    assert_close(before + attn_post, middle)
    assert_close(middle + mlp_post, after)
    assert far(attn, attn_post)
    assert far(mlp, mlp_post)


def test_sequential_blocks_of_a_parallel_family_have_no_middle_residual():
    sequential, parallel = loaded("gpt_neox_sequential"), loaded("gpt_neox")
    cache = sequential.capture(token_ids(), ["resid_mid.1", "mlp_in.1", "resid_pre.1"])
    tape = by_hand("gpt_neox_sequential")
    for name in ("resid_mid.1", "mlp_in.1"):
        assert_close(cache[name], tape[name])
    with torch.no_grad():
        as_if_parallel = sequential.hf.gpt_neox.layers[1].post_attention_layernorm(cache["resid_pre.1"])
    assert far(as_if_parallel, cache["mlp_in.1"])
    assert "both read resid_pre" in parallel.refuses("resid_mid.1")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "falcon", "falcon_grouped", "phi3"])
def test_a_fused_projection_is_cut_as_another_family_packs_it(family):
    m = loaded(family)
    facts = m.facts
    cache = m.capture(token_ids(), ["attn_probs.1", "value.1", "z.1", "attn_in.1"])
    value = cache.per_head("value.1").transpose(1, 2).repeat_interleave(facts.n_heads // facts.n_kv_heads, 1)
    assert_close((cache["attn_probs.1"] @ value).transpose(1, 2).flatten(-2), cache["z.1"])
    fused = m.hf.get_submodule(m.anatomy.blocks[1].modules["w_v"])
    with torch.no_grad():
        projected = fused(cache["attn_in.1"])
    last = projected[..., -cache["value.1"].shape[-1] :]
    assert far(last, cache["value.1"]) == (family in ("gpt_neox", "falcon_grouped"))


def test_key_heads_are_tiled_over_the_query_heads_rather_than_repeated():
    m = loaded("llama")
    cache = m.capture(token_ids(), ["attn_probs.1", "value.1", "z.1"])
    value = cache.per_head("value.1").transpose(1, 2)

    def mixed(spread: torch.Tensor) -> torch.Tensor:
        return (cache["attn_probs.1"] @ spread).transpose(1, 2).flatten(-2)

    assert_close(mixed(value.repeat_interleave(2, 1)), cache["z.1"])
    assert far(mixed(value.repeat(1, 2, 1, 1)), cache["z.1"])


def test_the_width_of_a_head_is_divided_out_of_the_models_width():
    m = loaded("qwen3")
    assert (m.facts.d_model, m.facts.n_heads, m.facts.head_dim) == (48, 4, 16)
    cache = m.capture(token_ids(), ["z.1", "attn_out.1"])
    w_o = m.hf.model.layers[1].self_attn.o_proj.weight.detach()
    heads = cache.per_head("z.1")
    assert_close(sum(heads[:, :, h] @ w_o[:, 16 * h : 16 * h + 16].T for h in range(4)), cache["attn_out.1"])
    assert m.points()["z.1"].width == 64


def test_fused_attention_gives_no_probabilities():
    m = loaded("llama", "sdpa")
    probs = m.capture(token_ids(), "attn_probs.1")["attn_probs.1"]
    assert_close(probs, by_hand("llama")["attn_probs.1"])
    assert_close(probs.sum(-1), torch.ones(2, families.HEADS, 9))
    assert bool((probs.triu(1) == 0).all())
    assert m.hf.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("family", "local"), [("mistral", [0, 1, 2]), ("gemma3_text", [0, 2]), ("qwen2", [1, 2])])
def test_a_local_layer_attends_past_its_window(family, attention, local):
    cache = loaded(family, attention).capture(token_ids(), [("attn_probs", n) for n in range(3)])
    distance = torch.arange(9)[:, None] - torch.arange(9)
    for layer in range(3):
        past = cache["attn_probs", layer][:, :, distance >= families.WINDOW]
        assert bool((past == 0).all()) == (layer in local)


@pytest.mark.parametrize("name", ["attn_out", "mlp_out"])
def test_the_multiplier_of_what_a_sublayer_adds_is_left_out(name):
    """The two point the same way, so only their sizes can tell."""
    cache = loaded("granite").capture(token_ids(), [f"{name}.1", f"{name}_post.1"])
    raw, added = cache.values()
    assert_close(added, 0.22 * raw)
    assert_close(torch.cosine_similarity(raw, added, dim=-1), torch.ones(2, 9))
    assert_close(added, by_hand("granite")[f"{name}_post.1"])


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("gemma2", lambda x: 3 * torch.tanh(x / 3)),
        ("gemma3_text", lambda x: 3 * torch.tanh(x / 3)),
        ("granite", lambda x: x / 4),
        ("cohere", lambda x: x * 0.25),
    ],
)
def test_what_a_family_does_to_its_logits_is_folded_into_the_unembedding(family, shape):
    m = loaded(family)
    cache = m.capture(token_ids(), ["final_norm", "lm_head", "logits"])
    bare = cache["final_norm"] @ m.hf.lm_head.weight.detach().T
    assert_close(cache["lm_head"], bare)
    assert_close(cache["logits"], shape(bare))
    assert far(cache["logits"], cache["lm_head"])
    with torch.no_grad():
        assert torch.equal(cache["logits"], m.hf(token_ids(), use_cache=False).logits)


@pytest.mark.parametrize(("family", "renormalised"), [("mixtral", True), ("qwen3_moe", False)])
def test_the_weights_of_chosen_experts_follow_another_familys_convention(family, renormalised):
    cache = loaded(family).capture(token_ids(), ["router_logits.2", "expert_weights.2", "expert_indices.2"])
    full, chosen = cache["router_logits.2"].softmax(-1).topk(2, -1)
    assert torch.equal(chosen, cache["expert_indices.2"])
    other = full / full.sum(-1, keepdim=True)
    right, wrong = (other, full) if renormalised else (full, other)
    assert_close(cache["expert_weights.2"], right)
    assert far(wrong, right)


def test_one_answer_is_given_for_dense_and_sparse_layers():
    points = loaded("qwen3_moe").points()
    asked = ("router_logits", "expert_weights", "expert_indices", "mlp_pre", "mlp_pre_linear", "mlp_act")
    served = [[name for name in asked if points[name, layer].served] for layer in range(3)]
    assert served == [list(asked[:3]), list(asked[3:]), list(asked[:3])]


# ---- references, hooks, files


@pytest.mark.parametrize(("family", "kind"), [("falcon", tuple), ("llama", torch.Tensor), ("gptj", torch.Tensor)])
def test_a_blocks_tuple_is_taken_for_a_tensor_or_a_tensor_for_a_tuple(family, kind):
    m = loaded(family)
    given = []
    block = m.hf.get_submodule(m.anatomy.blocks[1].path)
    hook = block.register_forward_hook(lambda _, __, out: given.append(out))
    residual = m.capture(token_ids(3), "resid_post.1")["resid_post.1"]
    hook.remove()
    assert isinstance(given[0], kind)
    assert_close(residual, by_hand(family, token_ids(3))["resid_post.1"])


def test_an_addition_in_place_changes_what_was_kept_by_reference():
    cache = loaded("falcon").capture(token_ids(), ["mlp_out.1", "attn_out.1"])
    assert_close(cache["mlp_out.1"], by_hand("falcon")["mlp_out.1"])
    assert far(cache["mlp_out.1"] + cache["attn_out.1"], cache["mlp_out.1"])


def test_a_callback_that_fails_leaves_its_hook_behind():
    m = locant.load_model(families.fresh("llama"))
    right = m.capture(token_ids(), "logits")["logits"]
    failing = m.hf.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        m.capture(token_ids(), ["attn_probs.1", "logits"])
    failing.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in m.hf.modules())
    with torch.no_grad():
        assert torch.equal(m.hf(token_ids(), use_cache=False).logits, right)


def test_a_second_gradient_has_the_first_one_added():
    m = loaded("llama")
    got = []
    for _ in range(2):
        cache = m.capture(token_ids(1), ["resid_post.1", "logits"], grad=True)
        got += torch.autograd.grad(cache["logits"][0, -1, 7], cache["resid_post.1"])
    assert torch.equal(got[0], got[1])
    assert bool(got[0].abs().max() > 0)


def test_a_compiled_model_ignores_hooks_that_come_late():
    hf = families.fresh("llama")
    compiled = torch.compile(hf, backend="eager", dynamic=False)
    with torch.no_grad():
        compiled(token_ids(), use_cache=False)
    m = locant.load_model(compiled)
    assert_close(m.capture(token_ids(), "resid_post.1")["resid_post.1"], Reference(hf)(token_ids())["resid_post.1"])
    hf.compile(backend="eager")
    with pytest.raises(locant.ModelError, match="compiled"):
        locant.load_model(hf)


def test_a_view_of_heads_cannot_be_saved(tmp_path):
    cache = loaded("llama").capture(token_ids(), ["value.1", "resid_post.1"])
    heads = cache.per_head("value.1").transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        save_file({"heads": heads}, tmp_path / "heads")
    turned = locant.Cache({locant.Address("value", 1): heads}, cache.tokens)
    assert torch.equal(locant.Cache.load(turned.save(tmp_path / "cache"))["value.1"], heads)
    one = cache.at(3)
    assert torch.equal(locant.Cache.load(one.save(tmp_path / "one"))["resid_post.1"], cache["resid_post.1"][:, 3])


def test_what_was_captured_cannot_enter_a_graph_later():
    m = loaded("gpt2")
    with torch.inference_mode():
        x = m.capture(token_ids(), "resid_post.1")["resid_post.1"]
    probe = torch.nn.Linear(families.WIDTH, 1)
    probe(x).sum().backward()
    assert probe.weight.grad is not None
    assert not x.requires_grad


def test_a_capture_asked_to_one_device_stays_scattered():
    cache = loaded("llama").capture(token_ids(), ["embeddings", "resid_post.2", "attn_probs.0"], device="cpu")
    assert {tensor.device for tensor in cache.values()} == {torch.device("cpu")}
