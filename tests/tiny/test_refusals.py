"""Mistakes, each answered before any module runs with what was asked, what there is and what to do instead."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel, T5Config, T5ForConditionalGeneration

import families
import locant
from families import loaded, token_ids
from locant import Address
from tokenizing import words


@pytest.fixture
def idle():
    """Fails a test in which any module ran."""
    for family in families.FAMILIES:
        loaded(family)
    ran: list[str] = []
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
    yield
    hook.remove()
    assert not ran


def told(error: type[Exception], *says: str, family="llama", prompt=(5, 6), address="resid_post.1", **options) -> None:
    """The capture and the run with logits fail with `error`, whose text has every part of `says`."""
    model = loaded(family)
    for call in (model.capture, model.run_with_cache) if address is not None else (model.capture,):
        with pytest.raises(error) as caught:
            call(prompt, address, **options)
        assert isinstance(caught.value, locant.LocantError)
        for part in says:
            assert part in str(caught.value)


# ---- addresses

ADDRESSES = [
    ("resid_post.1\n", locant.AddressError, "\\n"),
    (" resid_post.1", locant.AddressError, "' '"),
    ("", locant.AddressError, "not empty"),
    ("resid_post", locant.AddressError, "layer is missing", "resid_post.5"),
    ("resid_post.", locant.AddressError, "empty parts"),
    ("resid_post.01", locant.AddressError, "leading zeros"),
    ("resid_post.-1", locant.AddressError, "without a sign"),
    ("resid_post.1.5", locant.UnknownCoordinate, "5"),
    ("resid_post:1", locant.AddressError, "resid_post.1"),
    ("resid_post.1.head-3", locant.UnknownCoordinate, "head-3"),
    ("embeddings.3", locant.AddressError, "embeddings"),
    (("embeddings", 3), locant.AddressError, "takes no coordinates"),
    (("resid_post", 1.0), locant.AddressError, "float"),
    (("resid_post", True), locant.AddressError, "bool"),
    (("resid_post", -1), locant.AddressError, "negative"),
    (("resid_post", np.int64(1)), locant.AddressError, "int64"),
    (("resid_post", None), locant.AddressError, "layer is missing"),
    (("resid_post", "1"), locant.AddressError),
    (5, locant.AddressError, "5"),
    (3.5, locant.AddressError),
    ([], locant.AddressError, "empty"),
    ([None], locant.AddressError, "None"),
    (["resid_post.1", 7], locant.AddressError, "7"),
    ("resid_post.3", locant.LayerOutOfRange, "3 layers", "0 to 2", "resid_post.2"),
    (("attn_probs", 99), locant.LayerOutOfRange, "99"),
    ("resid_pots.1", locant.ModulePathError, "no point", "resid_post"),
    ("model.layers.1.mpl", locant.ModulePathError, "model.layers.1.mlp"),
    ("model.layers.7.mlp", locant.ModulePathError, "no module"),
    ("lm_haed", locant.ModulePathError, "lm_head"),
    ("resid_post.1.stream-0", locant.PointUnavailable, "one residual stream"),
    ("resid_streams.1", locant.PointUnavailable, "several residual streams", "resid_post"),
    ("attn_stream_write.1", locant.PointUnavailable, "several residual streams"),
    ("router_logits.1", locant.PointUnavailable, "dense", "mlp_pre"),
    ("expert_weights.1", locant.PointUnavailable, "dense"),
    ("q_norm_out.1", locant.PointUnavailable, "no norm"),
    ("attn_gate.1", locant.PointUnavailable, "not gated"),
]


@pytest.mark.parametrize(("address", "error", "says"), [(a, e, s) for a, e, *s in ADDRESSES], ids=repr)
@pytest.mark.usefixtures("idle")
def test_an_address_that_is_wrong_is_refused_before_any_forward(address, error, says):
    told(error, *says, address=address)
    if isinstance(address, (str, tuple)):
        told(error, *says, address=["resid_post.0", address])
        assert loaded("llama").refuses(address)


@pytest.mark.usefixtures("idle")
def test_no_address_at_all_is_refused():
    with pytest.raises(locant.AddressError, match="None"):
        loaded("llama").capture(token_ids(), None)


@pytest.mark.usefixtures("idle")
def test_refuses_never_raises():
    for value in (None, 5, 3.5, [], {}, b"resid_post.1", ("resid_post",), object(), "resid_post.1\n"):
        assert loaded("llama").refuses(value)
    assert loaded("llama").refuses("resid_post.1") is None
    assert loaded("llama").refuses("model.layers.1.mlp") is None
    assert loaded("llama").refuses(("embeddings", None)) is None


LACKING = [
    ("gpt2", "mlp_pre_linear.1", "one branch", "mlp_pre"),
    ("gpt_neox", "resid_mid.1", "both read resid_pre", "resid_pre"),
    ("gptj", "resid_mid.0", "both read resid_pre"),
    ("falcon", "resid_mid.2", "both read resid_pre"),
    ("mixtral", "mlp_act.1", "experts", "mlp_in"),
    ("mixtral", "mlp_pre.0", "experts"),
    ("qwen3_moe", "router_logits.1", "layers 0, 2"),
    ("qwen3_moe", "mlp_act.0", "layers 1 of this model have it"),
    ("llama", "q_norm_in.1", "no norm", "query"),
]


@pytest.mark.parametrize(("family", "address", "says"), [(f, a, s) for f, a, *s in LACKING])
@pytest.mark.usefixtures("idle")
def test_a_point_that_this_model_lacks_is_refused_with_what_to_read_instead(family, address, says):
    told(locant.PointUnavailable, address, *says, family=family, address=address)


def test_a_bare_string_or_pair_is_one_address():
    model = loaded("llama")
    for address in ("resid_post.1", ("resid_post", 1), Address("resid_post", 1), ("resid_post", 1, None)):
        assert list(model.capture(token_ids(), address)) == [Address("resid_post", 1)]
    for address in ("embeddings", ("embeddings", None), Address("embeddings"), "lm_head"):
        assert len(model.capture(token_ids(), address)) == 1
    two = model.capture(token_ids(), ("resid_post.1", "embeddings"))
    assert list(two) == [Address("resid_post", 1), Address("embeddings")]


def test_an_address_asked_for_twice_is_captured_once():
    cache = loaded("llama").capture(token_ids(), ["resid_post.1", ("resid_post", 1), "embeddings"])
    assert list(cache) == [Address("resid_post", 1), Address("embeddings")]
    assert len(loaded("llama").capture(token_ids(), (a for a in ["resid_post.1", "z.0"]))) == 2


def test_a_modules_path_reads_its_output():
    model = loaded("llama")
    cache = model.capture(token_ids(), ["model.layers.1.mlp", "mlp_out.1", "model.layers.1.self_attn", "attn_out.1"])
    assert torch.equal(cache["model.layers.1.mlp"], cache["mlp_out.1"])
    assert torch.equal(cache["model.layers.1.self_attn"], cache["attn_out.1"])


@pytest.mark.parametrize(("family", "path"), [("llama", "model.rotary_emb"), ("gpt2", "transformer.wpe")])
def test_a_modules_output_that_all_prompts_share_is_given_to_each(family, path):
    model = loaded(family)
    alone = model.capture([5, 6, 7], path)[path]
    cache = model.capture([[5, 6, 7], [8]], path)
    assert torch.equal(cache.prompt(0)[path], alone)
    assert torch.equal(cache.prompt(1)[path], alone[:, :1])
    last = model.capture([[5, 6, 7], [8]], path, positions=-1)[path]
    assert torch.equal(last, torch.stack([alone[0, 2], alone[0, 0]]))


# ---- prompts

PROMPTS = [
    ([], "no prompts"),
    ([[]], "prompt 0 is empty"),
    ([[5], []], "prompt 1 is empty"),
    (torch.empty(0, dtype=torch.long), "empty"),
    (torch.empty(2, 0, dtype=torch.long), "empty"),
    (torch.empty(0, 3, dtype=torch.long), "no prompts"),
    ([5] * 65, "65 tokens", "64"),
    ([[5], [5] * 65], "prompt 1", "65 tokens"),
    ([97], "97", "0 to 96"),
    ([5, -1], "-1", "0 to 96"),
    ([[5], [5, 1000]], "prompt 1", "1000"),
    (torch.tensor([[5, 97]]), "97"),
    ([1.0, 2.0], "float"),
    ([True, False], "bool"),
    ([None], "NoneType"),
    ([[1], 5], "prompt 1"),
    ([[1, [2]]], "list"),
    ([[5, None]], "NoneType"),
    (5, "int"),
    (None, "NoneType"),
    (b"abc", "bytes"),
    ({"role": "user", "content": "hello"}, "dict"),
    (torch.tensor([1.0]), "float32"),
    (torch.tensor([True]), "bool"),
    (torch.tensor(5), "shape ()"),
    (torch.tensor([[[5]]]), "(1, 1, 1)"),
    (np.array([[1.0]]), "float"),
    ("the cat", "without a tokenizer", "token ids"),
    (["the cat"], "without a tokenizer"),
    ([{"role": "user", "content": "hello"}], "without a tokenizer"),
]


@pytest.mark.parametrize(("prompt", "says"), [(p, s) for p, *s in PROMPTS], ids=[repr(p)[:40] for p, *_ in PROMPTS])
@pytest.mark.usefixtures("idle")
def test_a_prompt_that_is_wrong_is_refused_before_any_forward(prompt, says):
    told(locant.PromptError, *says, prompt=prompt)


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (9, "9 tokens, 0 to 8"),
        (-10, "-10"),
        ([0, 9], "9"),
        ([], "[]"),
        (1.5, "1.5"),
        ([1.5], "1.5"),
        (True, "True"),
        ("last", "last"),
        ([None], "None"),
        (object(), "object"),
    ],
)
@pytest.mark.usefixtures("idle")
def test_positions_that_are_wrong_are_refused_before_any_forward(positions, says):
    told(locant.PromptError, says, prompt=token_ids(), positions=positions)


def test_a_position_that_one_prompt_of_a_batch_lacks_is_refused_naming_it():
    with pytest.raises(locant.PromptError, match="position 2 of prompt 1"):
        loaded("llama").capture([[5, 6, 7], [8]], "resid_post.1", positions=2)


def test_a_chat_needs_a_template():
    model = locant.load_model(families.tiny("llama"), tokenizer=words())
    with pytest.raises(locant.PromptError, match="chat template"):
        model.capture([{"role": "user", "content": "hello"}], "resid_post.1")


def test_a_text_without_tokens_is_refused():
    model = locant.load_model(families.tiny("llama"), tokenizer=words(bos=None))
    with pytest.raises(locant.PromptError, match="prompt 1 is empty"):
        model.capture(["hello", ""], "resid_post.1")


@pytest.mark.usefixtures("idle")
def test_unembedding_vectors_of_another_width_is_refused():
    with pytest.raises(locant.LocantError, match="48"):
        loaded("llama").unembed(torch.ones(1, 2, 47))


# ---- models


def encoder(cls):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
    model = cls(BertConfig(vocab_size=97, max_position_embeddings=64, **sizes))
    families.fill(model)
    return model.eval()


@pytest.mark.parametrize("cls", [BertForMaskedLM, BertModel])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_encoder_is_refused(cls, attention):
    hf = encoder(cls)
    hf.set_attn_implementation(attention)
    with pytest.raises(locant.ModelError, match=r"later tokens.*decoder-only"):
        locant.load_model(hf)


@pytest.mark.usefixtures("idle")
def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=97, d_model=48, num_layers=2, num_heads=4, d_ff=80, d_kv=12)
    with pytest.raises(locant.ModelError, match=r"encoder-decoder.*decoder-only"):
        locant.load_model(T5ForConditionalGeneration(config))


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), None, 5, {}])
@pytest.mark.usefixtures("idle")
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(locant.ModelError, match=type(thing).__name__):
        locant.load_model(thing)


def test_a_model_without_blocks_is_refused():
    class Flat(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed = nn.Embedding(97, 8)
            self.head = nn.Linear(8, 97)

        def get_input_embeddings(self):
            return self.embed

        def forward(self, input_ids, **_):
            return self.head(self.embed(input_ids))

    with pytest.raises(locant.ModelError, match="Flat"):
        locant.load_model(Flat(transformers.PretrainedConfig(vocab_size=97)))


@pytest.mark.usefixtures("idle")
def test_a_compiled_model_is_refused_and_its_original_is_not():
    hf = families.fresh("llama")
    hf.compile(backend="eager")
    with pytest.raises(locant.ModelError, match="compile"):
        locant.load_model(hf)


def test_the_original_under_a_compiled_wrapper_is_what_is_read():
    hf = families.fresh("llama")
    model = locant.load_model(torch.compile(hf, backend="eager"))
    assert model.hf is hf
    assert torch.equal(
        model.capture(token_ids(), "resid_post.1")["resid_post.1"],
        model.capture(token_ids(), "resid_pre.2")["resid_pre.2"],
    )


@pytest.mark.parametrize("source", ["no-such-model", "./no/such/folder", "no-such-file.gguf"])
@pytest.mark.usefixtures("idle")
def test_a_source_that_is_not_there_is_refused_by_name(source):
    with pytest.raises(locant.ModelError, match=source.removeprefix("./")):
        locant.load_model(source)


def test_a_trunk_without_a_head_serves_all_but_the_head():
    model = locant.load_model(families.tiny("llama").model)
    assert model.refuses("resid_post.2") is None
    assert model.refuses("final_norm") is None
    for name in ("lm_head", "logits"):
        assert "no unembedding" in model.refuses(name)
    with pytest.raises(locant.PointUnavailable, match="unembed"):
        model.unembed(torch.ones(1, 2, families.WIDTH))
    with pytest.raises(locant.PointUnavailable):
        model.run_with_cache(token_ids(), "resid_post.1")
