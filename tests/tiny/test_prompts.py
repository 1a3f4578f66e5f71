"""From what a user calls a prompt to the ids that the model reads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import families
import locant
from comparing import assert_close
from families import loaded, token_ids
from reference import Reference
from tokenizing import BOS, BOS_CHAT, OPEN_CHAT, PLAIN_CHAT, TEXTS, TURN_CHAT, ids_of, words

CHAT = [{"role": "user", "content": "hello world"}]
LONG_CHAT = [{"role": "system", "content": "the cat"}, *CHAT, {"role": "assistant", "content": "one two"}]
POINTS = ["resid_post.1", "attn_probs.1", "embeddings"]


def model(**options: object) -> locant.EagerModel:
    return locant.load_model(families.tiny("llama"), tokenizer=words(**options))


# ---- every kind of prompt


IDS = token_ids(1, 6)[0].tolist()
ONE_PROMPT = {
    "list": IDS,
    "tuple": tuple(IDS),
    "tensor": torch.tensor(IDS),
    "tensor of a batch": torch.tensor([IDS]),
    "int32 tensor": torch.tensor(IDS, dtype=torch.int32),
    "array": np.array(IDS),
    "array of a batch": np.array([IDS]),
    "list of lists": [IDS],
    "list of tuples": [tuple(IDS)],
    "list of tensors": [torch.tensor(IDS)],
    "list of arrays": [np.array(IDS)],
    "list of numpy integers": list(np.array(IDS)),
    "list of tensors of one id": list(torch.tensor(IDS)),
    "range": range(5, 11),
}


@pytest.mark.parametrize("kind", ONE_PROMPT)
def test_ids_are_taken_as_they_are_in_every_form(kind):
    prompt = ONE_PROMPT[kind]
    ids = list(prompt) if kind == "range" else IDS
    captured = model().capture(prompt, "resid_post.1")
    assert captured.tokens == (tuple(ids),)
    wanted = Reference(families.tiny("llama"))(torch.tensor([ids]))["resid_post.1"]
    assert_close(captured["resid_post.1"], wanted)


def test_one_prompt_and_a_list_of_one_are_the_same():
    m = model(chat_template=OPEN_CHAT)
    for prompt in (TEXTS[0], IDS, CHAT):
        assert m.tokens(prompt) == m.tokens([prompt])
        assert len(m.tokens(prompt)) == 1


def test_text_ids_and_chats_mix_in_one_batch():
    m = model(chat_template=OPEN_CHAT)
    prompts = [TEXTS[1], IDS, CHAT, torch.tensor([7])]
    cache = m.capture(prompts, POINTS)
    assert cache.tokens == tuple(m.tokens(p)[0] for p in prompts)
    for i, prompt in enumerate(prompts):
        alone = m.capture(prompt, POINTS)
        for name in POINTS:
            assert_close(cache.prompt(i)[name], alone[name], name)


@given(st.lists(st.lists(st.integers(0, families.VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=5))
def test_any_batch_of_ids_is_its_prompts_one_by_one(prompts):
    m = loaded("gpt2")
    cache = m.capture(prompts, ["resid_post.2", "z.1"])
    assert cache.lengths == tuple(map(len, prompts))
    for i, prompt in enumerate(prompts):
        wanted = Reference(m.hf)(torch.tensor([prompt]))
        for name in ("resid_post.2", "z.1"):
            assert_close(cache.prompt(i)[name], wanted[name], name)


def test_the_longest_prompt_the_context_allows_is_read():
    assert loaded("gpt2").capture([5] * families.CONTEXT, "resid_post.0").lengths == (families.CONTEXT,)


# ---- the tokenizer's settings


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
def test_padding_settings_make_no_difference(family, side, pad):
    m = locant.load_model(families.tiny(family), tokenizer=words(padding_side=side, pad=pad, adds="$A <eos>"))
    cache = m.capture(TEXTS, ["resid_post.2", "attn_probs.1", "logits"])
    for i, text in enumerate(TEXTS):
        ids = [BOS, *ids_of(text), *ids_of("<eos>")]
        assert cache.tokens[i] == tuple(ids)
        wanted = Reference(m.hf)(torch.tensor([ids]))
        for address, tensor in cache.prompt(i).items():
            assert_close(tensor, wanted[str(address)], address)


def test_truncation_that_a_tokenizer_was_set_to_does_not_shorten_a_prompt():
    tokenizer = words()
    tokenizer.backend_tokenizer.enable_padding(length=20, pad_id=0, pad_token="<pad>")
    m = locant.load_model(families.tiny("llama"), tokenizer=tokenizer)
    assert m.tokens("the cat") == ((BOS, *ids_of("the cat")),)


def test_the_tokenizer_is_left_as_it_was():
    tokenizer = words(padding_side="left", pad=None, chat_template=OPEN_CHAT)
    before = (tokenizer.padding_side, tokenizer.pad_token, len(tokenizer), tokenizer.backend_tokenizer.to_str())
    m = locant.load_model(families.tiny("llama"), tokenizer=tokenizer)
    m.capture([*TEXTS, CHAT], POINTS)
    assert before == (tokenizer.padding_side, tokenizer.pad_token, len(tokenizer), tokenizer.backend_tokenizer.to_str())


# ---- BOS

KINDS = {
    "adds BOS itself": {"adds": "<bos> $A"},
    "does not": {},
    "adds EOS only": {"adds": "$A <eos>"},
    "adds both": {"adds": "<bos> $A <eos>"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["the cat", "<bos> the cat"])
def test_a_text_gets_one_bos_at_its_start_and_its_own_special_tokens(kind, text):
    end = ids_of("<eos>") if "<eos>" in KINDS[kind].get("adds", "") else []
    assert model(**KINDS[kind]).tokens(text) == ((BOS, *ids_of("the cat"), *end),)


@pytest.mark.parametrize("kind", KINDS)
def test_without_prepending_a_text_has_the_bos_that_is_written_in_it(kind):
    end = ids_of("<eos>") if "<eos>" in KINDS[kind].get("adds", "") else []
    m = model(**KINDS[kind])
    assert m.tokens("the cat", prepend_bos=False) == ((*ids_of("the cat"), *end),)
    assert m.tokens("<bos> the cat", prepend_bos=False) == ((BOS, *ids_of("the cat"), *end),)


def test_a_tokenizer_without_bos_gets_none():
    assert model(bos=None).tokens("the cat") == (tuple(ids_of("the cat")),)


def test_ids_get_no_bos():
    assert model().tokens([[5, 6], [7]]) == ((5, 6), (7,))


@pytest.mark.parametrize("template", [PLAIN_CHAT, OPEN_CHAT, BOS_CHAT])
def test_a_bos_that_opens_a_conversation_once_is_prepended_to_text(template):
    assert model(chat_template=template).tokens("the cat") == ((BOS, *ids_of("the cat")),)


def test_a_bos_that_opens_every_turn_is_not_prepended_to_text():
    m = model(chat_template=TURN_CHAT)
    assert m.tokens("the cat") == (tuple(ids_of("the cat")),)
    assert m.tokens("<bos> the cat") == ((BOS, *ids_of("the cat")),)


def test_prepending_is_what_the_capture_read():
    m = model()
    for prepend in (True, False):
        cache = m.capture("the cat", "resid_post.1", prepend_bos=prepend)
        assert cache.tokens == m.tokens("the cat", prepend)
        wanted = Reference(m.hf)(torch.tensor(cache.tokens))["resid_post.1"]
        assert_close(cache["resid_post.1"], wanted)


# ---- chats


@pytest.mark.parametrize("template", [PLAIN_CHAT, OPEN_CHAT, BOS_CHAT, TURN_CHAT])
@pytest.mark.parametrize("adds", ["", "<bos> $A", "<bos> $A <eos>"])
@pytest.mark.parametrize("messages", [CHAT, LONG_CHAT, LONG_CHAT[:2]], ids=len)
def test_a_chat_is_what_the_chat_template_makes_of_it(template, adds, messages):
    m = model(chat_template=template, adds=adds)
    asks = messages[-1]["role"] != "assistant"
    wanted = m.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=asks, return_dict=False)
    assert m.tokens(messages) == (tuple(wanted),)
    assert m.capture(messages, "resid_post.1").tokens == (tuple(wanted),)


def test_several_chats_are_several_prompts():
    m = model(chat_template=OPEN_CHAT)
    assert m.tokens([CHAT, LONG_CHAT]) == (*m.tokens(CHAT), *m.tokens(LONG_CHAT))


# ---- strings of tokens


def test_token_strings_stand_beside_the_ids_they_are_of():
    m = model(adds="$A <eos>")
    cache = m.capture(TEXTS, "resid_post.1")
    strings = cache.origin.token_strings
    assert [len(s) for s in strings] == list(cache.lengths)
    assert [s.strip() for s in strings[0]] == ["<bos>", *TEXTS[0].split(), "<eos>"]
    assert cache.prompt(1).origin.token_strings == (strings[1],)


def test_without_a_tokenizer_there_are_no_token_strings():
    assert loaded("llama").capture(IDS, "resid_post.1").origin.token_strings == ()
