"""Bugs that interpretability tools have had on real models and tokenizers, by their symptom."""

import copy

import pytest
import torch

import locant
from comparing import assert_close, errors
from reference import Reference

TEXTS = ["The capital of France is Paris, and the capital of Italy is", "Hello world", "One two three four five"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def by_hand(model: locant.EagerModel, ids: object) -> dict[str, torch.Tensor]:
    return Reference(model.hf)(torch.tensor([list(ids)]))


# ---- tokens


def test_bos_stands_twice_before_a_text(gemma3):
    bos = gemma3.tokenizer.bos_token_id
    for text in ("hello world", "<bos>hello world"):
        (ids,) = gemma3.tokens(text)
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert gemma3.tokens("hello world") == gemma3.tokens("<bos>hello world")
    assert gemma3.tokens("hello world", prepend_bos=False) == (gemma3.tokens("hello world")[0][1:],)


def test_a_bos_that_opens_a_turn_is_put_before_plain_text(smollm2):
    assert smollm2.tokenizer.bos_token == "<|im_start|>"
    for prepend in (True, False):
        (ids,) = smollm2.tokens("hello world", prepend)
        assert smollm2.tokenizer.bos_token_id not in ids
        assert list(ids) == smollm2.tokenizer("hello world")["input_ids"]


@pytest.mark.parametrize("messages", [CHAT, [*CHAT, {"role": "assistant", "content": "4"}]], ids=len)
def test_a_chat_is_tokenized_with_special_tokens_a_second_time(smollm2, messages):
    asks = messages[-1]["role"] == "user"
    wanted = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)
    (ids,) = smollm2.tokens(messages)
    assert list(ids) == wanted
    assert ids.count(smollm2.tokenizer.bos_token_id) == 3
    assert smollm2.capture(messages, "embeddings").tokens == (ids,)


@pytest.mark.parametrize("text", ["Hello wörld 🙂", "naïve 🙂🙂 你好!", " leading", "two  spaces\nand a line"])
def test_token_strings_are_not_as_many_as_tokens(model, text):
    cache = model.capture(text, "embeddings")
    (strings,) = cache.origin.token_strings
    assert len(strings) == cache.lengths[0] == cache["embeddings"].shape[1]
    assert model.tokens(text) == cache.tokens


# ---- padding


def test_padding_that_is_a_real_token_hides_the_end_of_a_turn(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    (ids,) = smollm2.tokens(CHAT)
    assert ids.count(tokenizer.pad_token_id) == 2
    cache = smollm2.capture([CHAT, "Hello world", "Once upon a time, " * 4], "resid_post.20")
    right = by_hand(smollm2, ids)["resid_post.20"]
    assert_close(cache.prompt(0)["resid_post.20"], right, row=1e-3)
    row = torch.tensor([ids])
    with torch.no_grad():
        mask = (row != tokenizer.pad_token_id).long()
        wrong = smollm2.hf(row, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states[21]
    assert errors(wrong[:, -1], right[:, -1])[0] > 1e-2


def test_a_position_lands_on_padding_or_on_another_prompts_token(model):
    right = [by_hand(model, ids)["resid_post.7"][0] for ids in model.tokens(TEXTS)]
    for position in (0, 1, -2, -1):
        got = model.capture(TEXTS, "resid_post.7", positions=position)["resid_post.7"]
        for i, residual in enumerate(right):
            assert_close(got[i], residual[position], row=1e-3)


def test_a_pooled_vector_depends_on_the_padding_of_its_batch(smollm2):
    cache = smollm2.capture(TEXTS, "resid_post.5")
    for i, ids in enumerate(cache.tokens):
        right = by_hand(smollm2, ids)["resid_post.5"].mean(1)
        assert_close(cache.prompt(i)["resid_post.5"].mean(1), right)
    assert bool(cache["resid_post.5"][1].mean(0).isnan().all())


def test_a_tokenizer_without_a_padding_token_cannot_batch(smollm2):
    tokenizer = copy.deepcopy(smollm2.tokenizer)
    tokenizer.pad_token = None
    bare = locant.EagerModel(smollm2.hf, tokenizer)
    cache, wanted = (m.capture(TEXTS, "resid_post.3") for m in (bare, smollm2))
    for i in range(len(TEXTS)):
        assert torch.equal(cache.prompt(i)["resid_post.3"], wanted.prompt(i)["resid_post.3"])
    assert tokenizer.pad_token is None


def test_the_side_of_padding_changes_values(gemma3):
    tokenizer = copy.deepcopy(gemma3.tokenizer)
    assert tokenizer.padding_side == "left"
    tokenizer.padding_side = "right"
    other = locant.EagerModel(gemma3.hf, tokenizer)
    a, b = (m.capture(TEXTS, ["resid_post.3", "attn_probs.5"]) for m in (gemma3, other))
    for address, tensor in a.items():
        assert torch.equal(tensor.nan_to_num(7), b[address].nan_to_num(7))


def test_a_batch_differs_from_its_prompts_by_more_than_rounding(model):
    cache = model.capture(TEXTS, ["resid_post.1", "resid_post.10", "attn_probs.7", "logits"])
    for i, text in enumerate(TEXTS):
        alone = model.capture(text, list(cache))
        for address, tensor in cache.prompt(i).items():
            assert_close(tensor, alone[address], address, row=1e-3)


# ---- values


@pytest.mark.parametrize(("name", "layer"), [("smollm2", 20), ("gemma3", 3)])
def test_the_first_token_dominates_every_statistic(request, name, layer):
    """A row's error is measured by the row: the first one is so large that it would hide all others."""
    model = request.getfixturevalue(name)
    norms = model.capture(TEXTS[0], ("resid_post", layer))["resid_post", layer][0].norm(dim=-1)
    assert norms[0] > 4 * norms[1:].max()
    tape = by_hand(model, model.tokens(TEXTS[0])[0])[f"resid_post.{layer}"][0]
    assert_close(norms[1:].mean(), tape[1:].norm(dim=-1).mean())


def test_key_heads_are_tiled_over_the_query_heads_rather_than_repeated(smollm2):
    assert (smollm2.facts.n_heads, smollm2.facts.n_kv_heads, smollm2.facts.head_dim) == (9, 3, 64)
    cache = smollm2.capture(TEXTS[0], ["attn_probs.4", "value.4", "z.4"])
    value = cache.per_head("value.4").transpose(1, 2)

    def mixed(spread: torch.Tensor) -> torch.Tensor:
        return (cache["attn_probs.4"] @ spread).transpose(1, 2).flatten(-2)

    assert_close(mixed(value.repeat_interleave(3, 1)), cache["z.4"], row=1e-3)
    assert errors(mixed(value.repeat(1, 3, 1, 1)), cache["z.4"])[0] > 0.1


def test_the_width_of_a_head_is_divided_out_of_the_models_width(gemma3):
    facts = gemma3.facts
    assert (facts.d_model, facts.n_heads, facts.n_kv_heads, facts.head_dim) == (640, 4, 1, 256)
    cache = gemma3.capture(TEXTS[0], ["z.3", "value.3", "attn_out.3"])
    assert (cache["z.3"].shape[-1], cache["value.3"].shape[-1]) == (1024, 256)
    w_o = gemma3.hf.model.layers[3].self_attn.o_proj.weight.detach()
    heads = cache.per_head("z.3")
    assert_close(
        sum(heads[:, :, h] @ w_o[:, 256 * h : 256 * h + 256].T for h in range(4)), cache["attn_out.3"], row=1e-3
    )


def test_a_sublayers_output_before_its_norm_is_taken_for_what_it_adds(gemma3):
    names = [f"{n}.6" for n in "resid_pre attn_out attn_out_post resid_mid mlp_out mlp_out_post resid_post".split()]
    before, attn, attn_post, middle, mlp, mlp_post, after = gemma3.capture(TEXTS[0], names).values()
    assert_close(before + attn_post, middle)
    assert_close(middle + mlp_post, after)
    assert errors(attn, attn_post)[0] > 0.1
    assert errors(mlp, mlp_post)[0] > 0.1


@pytest.mark.parametrize("name", ["smollm2"])
def test_noise_of_half_precision_is_reported_as_a_wrong_tensor(request, name):
    """Every point stays proven in bfloat16, and what is captured is what the model computes, bit by bit."""
    full = request.getfixturevalue(name)
    hf = copy.deepcopy(full.hf).to(torch.bfloat16)
    model = locant.load_model(hf, tokenizer=full.tokenizer)
    assert {row.proof for row in model.points()} == {"proven", "not applicable"}
    logits, cache = model.run_with_cache(TEXTS[0], ["resid_pre.5", "resid_pre.20", "attn_probs.7"])
    with torch.no_grad():
        own = hf(torch.tensor(cache.tokens), use_cache=False, output_hidden_states=True)
    assert torch.equal(logits, own.logits)
    exact = full.capture(TEXTS[0], list(cache))
    for layer in (5, 20):
        assert torch.equal(cache["resid_pre", layer], own.hidden_states[layer])
        assert 1e-3 < errors(cache["resid_pre", layer], exact["resid_pre", layer])[1] < 0.1


def test_the_embedding_scale_is_not_rounded_as_the_model_rounds_it(gemma3):
    table = gemma3.hf.get_input_embeddings().weight.detach()
    cache = gemma3.capture(TEXTS[0], ["embeddings", "resid_pre.0"])
    assert torch.equal(cache["embeddings"], cache["resid_pre.0"])
    assert_close(cache["embeddings"], table[torch.tensor(cache.tokens)] * 640**0.5)
