"""Streams of which attention and MLP read and write one: each point against hooks and the formulas of AltUp."""

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

import families
import locant
from comparing import assert_close
from locant import Address
from locant.anatomy.survey import survey

STREAMS, LAYERS, WIDTH, N_POS = 4, 3, families.WIDTH, 9
IDS = families.token_ids(2, N_POS)
BLOCKS = pytest.mark.parametrize("layer", range(LAYERS))
RESIDUALS = [f"resid_post.{layer}.stream-{k}" for layer in range(LAYERS) for k in range(STREAMS)]


def fresh(attention: str = "eager", **sizes: object) -> transformers.PreTrainedModel:
    config = transformers.Gemma3nTextConfig(
        **{
            "vocab_size": families.VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 40,
            "max_position_embeddings": 64,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "laurel_rank": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": families.VOCABULARY,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0],
            "altup_num_inputs": STREAMS,
            "altup_active_idx": 0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            **sizes,
        }
    )
    model = transformers.Gemma3nForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.float32)
    families.fill(model)
    return model.eval()


@cache
def loaded(attention: str = "eager") -> locant.EagerModel:
    return locant.load_model(fresh(attention))


@cache
def seen(attention: str = "eager") -> dict[str, Tensor]:
    """What the modules of the blocks were handed and gave, in one plain forward."""
    hf, found = loaded(attention).hf, dict[str, Tensor]()

    def hook(path: str):
        def see(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: object) -> None:
            given = output if isinstance(output, Tensor) else output[0]
            found[f"{path} in"] = (args[0] if args else kwargs["hidden_states"]).clone()
            found[f"{path} out"] = given.clone()

        return see

    paths = [(f"{i}{'.' if name else ''}{name}", m) for i, b in enumerate(hf.model.layers) for name, m in _named(b)]
    handles = [m.register_forward_hook(hook(path), with_kwargs=True) for path, m in [*paths, ("norm", hf.model.norm)]]
    with torch.no_grad():
        hf(input_ids=IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def _named(block: nn.Module) -> list[tuple[str, nn.Module]]:
    wanted = "input_layernorm self_attn post_attention_layernorm pre_feedforward_layernorm mlp mlp.down_proj "
    wanted += "post_feedforward_layernorm laurel post_per_layer_input_norm"
    return [("", block), *((name, block.get_submodule(name)) for name in wanted.split())]


def told(altup: nn.Module, vector: Tensor) -> Tensor:
    """How much of each kind a token is, from one vector of it, in float64: tanh(W_router norm(x) / d)."""
    x = vector.double()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + altup.router_norm.eps).sqrt() * altup.router_norm.weight.double()
    return torch.tanh(normed / WIDTH @ altup.modality_router.weight.double().T)


@torch.no_grad()
def predicted(altup: nn.Module, stack: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix from stream to stream ``[batch, pos, from, to]``, and what it makes of the stack."""
    flat = told(altup, stack[0]) @ altup.prediction_coefs.weight.double().T
    matrix = flat.unflatten(-1, (STREAMS, STREAMS)).transpose(-1, -2) + torch.eye(STREAMS, dtype=torch.float64)
    return matrix, torch.einsum("jbpd,bpjk->kbpd", stack.double(), matrix)


@torch.no_grad()
def corrections(altup: nn.Module, changed: Tensor) -> Tensor:
    """The weights ``[batch, pos, stream]`` with which the streams take over what changed in the one computed on."""
    return told(altup, changed) @ altup.correction_coefs.weight.double().T + 1


# ---- what is served


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_point_of_the_blocks_is_proven_or_says_why_it_is_not_there(attention):
    rows = loaded(attention).points()
    absent = {row.address.name for row in rows if not row.served}
    assert absent <= set(
        "attn_gate attn_stream_write mlp_stream_collapse mlp_stream_mix router_logits expert_weights expert_indices "
        "key k_norm_in k_norm_out".split()
    )
    for row in rows:
        assert row.proof == ("proven" if row.served else "not applicable"), row
        assert row.served or row.reason
    shared = {str(row.address) for row in rows if row.address.name == "key" and not row.served}
    assert shared == {"key.2"}  # that layer attends to the keys of another
    assert loaded(attention).facts.n_streams == STREAMS
    assert loaded(attention).facts.d_model == WIDTH


@BLOCKS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_residual_is_one_stream_of_the_stack_the_block_is_handed_and_gives(layer, attention):
    model, plain = loaded(attention), seen(attention)
    names = [f"{point}.{layer}.stream-{k}" for point in ("resid_pre", "resid_post") for k in range(STREAMS)]
    cache = model.capture(IDS, [*names, f"resid_streams.{layer}"])
    for k in range(STREAMS):
        assert torch.equal(cache[f"resid_pre.{layer}.stream-{k}"], plain[f"{layer} in"][k])
        assert torch.equal(cache[f"resid_post.{layer}.stream-{k}"], plain[f"{layer} out"][k])
    assert torch.equal(cache[f"resid_streams.{layer}"], plain[f"{layer} out"].permute(1, 2, 0, 3))
    assert cache[f"resid_streams.{layer}"].shape == (2, N_POS, STREAMS, WIDTH)


@BLOCKS
def test_the_sublayers_read_and_write_one_vector(layer):
    plain = seen()
    wanted = {
        "attn_stream_collapse": "input_layernorm in",
        "attn_in": "self_attn in",
        "attn_out": "self_attn out",
        "attn_out_post": "post_attention_layernorm out",
        "resid_mid": "pre_feedforward_layernorm in",
        "mlp_in": "mlp in",
        "mlp_act": "mlp.down_proj in",
        "mlp_out": "mlp out",
        "mlp_out_post": "post_feedforward_layernorm out",
    }
    cache = loaded().capture(IDS, [f"{name}.{layer}" for name in wanted])
    for name, place in wanted.items():
        assert torch.equal(cache[f"{name}.{layer}"], plain[f"{layer}.{place}"]), name


@BLOCKS
def test_the_streams_are_mixed_by_the_matrix_and_written_with_the_weights(layer):
    model, plain = loaded(), seen()
    altup = model.hf.model.layers[layer].altup
    names = "attn_stream_mix mlp_stream_write attn_stream_collapse resid_mid mlp_out_post".split()
    cache = model.capture(IDS, [f"{name}.{layer}" for name in names])
    mix, write, collapse, mid, added = (cache[f"{name}.{layer}"] for name in names)
    matrix, mixed = predicted(altup, plain[f"{layer} in"])
    assert_close(mix, matrix, "attn_stream_mix")
    assert_close(collapse, mixed[0], "attn_stream_collapse")
    assert_close(write, corrections(altup, mid + added), "mlp_stream_write")
    after = mixed + write.double().permute(2, 0, 1)[..., None] * (mid + added - collapse).double()
    after[1:] += plain[f"{layer}.post_per_layer_input_norm out"].double()
    assert_close(after.float(), plain[f"{layer} out"], "resid_streams")
    beside = plain[f"{layer}.laurel out"]  # its own input included
    assert_close(mid, (collapse + cache_of(model, f"attn_out_post.{layer}") + beside) / 2**0.5, "resid_mid")


def cache_of(model: locant.EagerModel, name: str) -> Tensor:
    return model.capture(IDS, name)[name]


def test_the_final_norm_reads_what_the_streams_are_merged_to():
    model, plain = loaded(), seen()
    last = plain[f"{LAYERS - 1} out"]
    size = last[0].pow(2).mean(-1, keepdim=True).sqrt()
    merged = [last[0]]
    with torch.no_grad():
        for stream, outlet in zip(last[1:], model.hf.model.altup_unembed_projections, strict=True):
            vector = outlet(stream)
            merged.append(vector * size / vector.pow(2).mean(-1, keepdim=True).clamp_min(1e-5).sqrt())
        wanted = model.hf.model.norm(torch.stack(merged).mean(0))
    assert_close(cache_of(model, "final_norm"), wanted, "final_norm")


def test_gradients_reach_every_stream():
    model = loaded()
    names = ["logits", "resid_post.0.stream-0", "resid_post.0.stream-3", "resid_streams.1"]
    cache = model.capture(IDS, names, grad=True)
    grads = torch.autograd.grad(cache["logits"].square().sum(), [cache[name] for name in names[1:]])
    assert all(float(grad.abs().max()) > 0 for grad in grads)
    assert grads[2].shape == (2, N_POS, STREAMS, WIDTH)


# ---- what is refused


@BLOCKS
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("resid_post.{}", "the residual of this model is 4 streams"),
        ("resid_pre.{}", "name the stream"),
        ("resid_mid.{}.stream-0", "resid_mid of this block is one vector"),
        ("resid_post.{}.stream-4", "4 residual streams, 0 to 3"),
        ("attn_stream_write.{}", "attention writes to one vector here"),
        ("mlp_stream_collapse.{}", "the MLP reads resid_mid here"),
        ("mlp_stream_mix.{}", "mixed once in this block"),
    ],
)
def test_what_these_blocks_have_not_is_refused(layer, address, says):
    model, name = loaded(), address.format(layer)
    assert says in (model.refuses(name) or "")
    with pytest.raises(locant.PointUnavailable, match=says):
        model.capture(IDS, name)


def test_weights_that_are_all_alike_prove_nothing():
    hf = fresh()
    with torch.no_grad():
        for block in hf.model.layers:
            block.altup.correction_coefs.weight.zero_()
            block.altup.prediction_coefs.weight.zero_()
    model = locant.load_model(hf)
    for layer in range(LAYERS):
        for name in ("mlp_stream_write", "attn_stream_mix"):
            assert model.points()[f"{name}.{layer}"].proof == "vacuous"
        assert model.refuses(f"resid_post.{layer}.stream-1") is None
        assert model.refuses(f"resid_mid.{layer}") is None


def test_another_stream_to_compute_on_is_found():
    model = locant.load_model(fresh(altup_active_idx=2))
    assert [block.lane for block in survey(model.hf).blocks] == [2] * LAYERS
    for layer in range(LAYERS):
        assert model.refuses(f"attn_stream_collapse.{layer}") is None
        assert model.refuses(Address("resid_post", layer, 2)) is None


def test_the_forward_is_left_as_it_was():
    hf = fresh()
    with torch.no_grad():
        before = hf(input_ids=IDS, use_cache=False).logits
    model = locant.load_model(hf)
    model.capture(IDS, RESIDUALS)
    with torch.no_grad():
        assert torch.equal(hf(input_ids=IDS, use_cache=False).logits, before)
