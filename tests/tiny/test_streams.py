"""Several residual streams: each point against hooks on the model's own modules and the formulas of its family."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear, silu

import families
import locant
from locant.anatomy.survey import survey

N_POS, LAYER, LAST = 7, 1, 2
WIDTH = families.WIDTH
IDS = families.token_ids(2, N_POS)
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SIZES = {
    "vocab_size": families.VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "v_head_dim": 16,
    "qk_nope_head_dim": 12,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "sliding_window": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
MIXED = {
    "o_groups": 2,
    "o_lora_rank": 12,
    "head_dim": 24,
    "qk_rope_head_dim": 4,
    "num_key_value_heads": 1,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "hc_mult": 4,
}
MEAN = {
    "index_kpool": 2,
    "hc_mult": 3,
    "qk_rope_head_dim": 0,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "indexer_types": ["full"] * 3,
}
KEPT = {
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "hc_mult": 4,
    "rope_parameters": ROPE,
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "layer_types": ["indexed_attention"] * 3,
    "indexer_types": ["full", "shared", "full"],
}
GATED = {
    "head_dim": 24,
    "num_key_value_heads": 2,
    "hc_count": 3,
    "hc_lowrank": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 40,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 24,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [3],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
}


def _config(name: str, **sizes: Any) -> Any:
    cls = getattr(transformers, name)
    known = {k: v for k, v in SIZES.items() if k in cls.__dataclass_fields__}
    return cls(**(known | sizes))


def _whole() -> Any:
    config = transformers.Glm5NextConfig()
    config.text_config = _config("Glm5NextTextConfig", **MEAN)
    small = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": WIDTH}
    for field, size in (small | {"projection_intermediate_size": 32}).items():
        setattr(config.vision_config, field, size)
    return config


MODELS: Mapping[str, tuple[str, Callable[[], Any], int]] = {
    "mixed": ("DeepseekV4ForCausalLM", lambda: _config("DeepseekV4Config", **MIXED), 4),
    "mean": ("Glm5NextForConditionalGeneration", _whole, 3),
    "kept": ("HYV4ForCausalLM", lambda: _config("HYV4Config", **KEPT), 4),
    "gated": ("Qwen4ExpForCausalLM", lambda: _config("Qwen4ExpTextConfig", **GATED), 3),
}
"""Trunks whose streams are mixed by a doubly-stochastic matrix (one merged by weights, one by the mean), kept as they
are, and read through a norm by a gate per channel from a residual that holds them side by side."""

ALL = pytest.mark.parametrize("name", MODELS)


def fresh(name: str) -> transformers.PreTrainedModel:
    cls, config, _ = MODELS[name]
    model = getattr(transformers, cls)._from_config(config(), attn_implementation="eager", dtype=torch.float32)
    families.fill(model)
    return model.eval()


@cache
def loaded(name: str) -> locant.EagerModel:
    return locant.load_model(fresh(name))


def blocks(hf: Any) -> Any:
    return getattr(hf.model, "language_model", hf.model).layers


def connections(name: str, block: Any) -> tuple[Any, Any]:
    """The modules before attention and before the MLP that read the streams."""
    if name == "gated":
        return block.attn_hyper_connection, block.mlp_hyper_connection
    return block.attn_hc, block.ffn_hc


def mixer(block: Any) -> Any:
    return block.self_attn if hasattr(block, "self_attn") else block.linear_attn


def hooked(model: locant.EagerModel, wanted: Mapping[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
    """What some modules were handed, or returned, in one plain forward."""
    seen: dict[str, Tensor] = {}

    def hook(key: str, side: str) -> Callable[..., None]:
        def see(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            taken = args[0] if args else kwargs["hidden_states"]
            given = output if isinstance(output, Tensor) else output[0]
            seen[key] = (taken if side == "input" else given).clone()

        return see

    handles = [m.register_forward_hook(hook(key, side), with_kwargs=True) for key, (m, side) in wanted.items()]
    with torch.no_grad():
        seen["logits"] = model.hf(input_ids=IDS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return seen


def stacked(name: str, tensor: Tensor) -> Tensor:
    """A residual as ``[batch, pos, stream, d]``."""
    return tensor.unflatten(-1, (MODELS[name][2], WIDTH)) if name == "gated" else tensor


def unit(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def coefficients(name: str, module: Any, stack: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a sublayer reads, its weights of writing, and the matrix, by the formulas of the family in float64."""
    n = stack.shape[-2]
    stack = stack.double()
    weights = {key: value.double() for key, value in module.named_parameters()}
    if name == "gated":
        normed = unit(stack, module.hc_norm.eps) * (1 + weights["hc_norm.weight"]).unflatten(0, (n, WIDTH))
        flat = normed.flatten(-2)
        low = silu(linear(flat, weights["input_mix_weight_down.weight"]) / n)
        gate = torch.sigmoid(linear(low, weights["input_mix_weight_up.weight"])).unflatten(-1, (n, WIDTH))
        write = 2 * torch.sigmoid(linear(flat, weights["block_inject_weight.weight"]) / n)
        return (gate * normed).sum(-2) / n, write, None
    flat, eps = stack.flatten(-2), module.hc_eps
    made = linear(unit(flat, module.input_norm.eps), weights["fn"])
    sizes = [n, n] if name == "kept" else [n, n, n * n]
    parts = [
        part * scale + base
        for part, scale, base in zip(made.split(sizes, -1), weights["scale"], weights["base"].split(sizes), strict=True)
    ]
    read = torch.sigmoid(parts[0]) + eps
    collapsed = torch.einsum("bpn,bpnd->bpd", read, stack)
    if name == "kept":
        return collapsed, module.hc_post_magnitude * torch.sigmoid(parts[1]) + eps, None
    mix = parts[2].unflatten(-1, (n, n)).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(module.hc_sinkhorn_iters - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return collapsed, 2 * torch.sigmoid(parts[1]), mix


@cache
def forward(name: str) -> dict[str, Tensor]:
    """Everything the tests compare with, from one forward with hooks of the test's own."""
    model = loaded(name)
    wanted: dict[str, tuple[nn.Module, str]] = {}
    for layer, block in enumerate(blocks(model.hf)):
        attention, mlp = connections(name, block)
        wanted |= {
            f"resid_pre.{layer}": (block, "input"),
            f"attn_stack.{layer}": (attention, "input"),
            f"attn_in.{layer}": (mixer(block), "input"),
            f"attn_out.{layer}": (mixer(block), "output"),
            f"resid_mid.{layer}": (mlp, "input"),
            f"mlp_in.{layer}": (block.mlp, "input"),
            f"mlp_out.{layer}": (block.mlp, "output"),
            f"resid_post.{layer}": (block, "output"),
        }
    return hooked(model, wanted | {"lm_head": (model.hf.lm_head, "output"), "head_in": (model.hf.lm_head, "input")})


def served(name: str, *addresses: str) -> list[Tensor]:
    cache = loaded(name).capture(IDS, addresses)
    return [cache[a] for a in addresses]


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a.double() - b.double()).norm(dim=-1).max() <= 1e-5 * b.double().norm(dim=-1).max())


@ALL
@pytest.mark.parametrize("layer", range(3))
def test_the_residual_is_read_one_stream_at_a_time_or_as_a_stack(name, layer):
    n, seen = MODELS[name][2], forward(name)
    assert loaded(name).facts.n_streams == n
    assert loaded(name).facts.d_model == WIDTH
    for point in ("resid_pre", "resid_mid", "resid_post"):
        stack = stacked(name, seen[f"{point}.{layer}"])
        for stream, got in enumerate(served(name, *(f"{point}.{layer}.stream-{k}" for k in range(n)))):
            assert torch.equal(got, stack[:, :, stream])
    whole, one = served(name, f"resid_streams.{layer}", f"resid_streams.{layer}.stream-1")
    assert torch.equal(whole, stacked(name, seen[f"resid_post.{layer}"]))
    assert torch.equal(one, whole[:, :, 1])


@ALL
@pytest.mark.parametrize("layer", range(3))
def test_the_stream_points_are_what_the_formulas_of_the_family_give(name, layer):
    seen, block = forward(name), blocks(loaded(name).hf)[layer]
    for short, module, stack, after in zip(
        ("attn", "mlp"), connections(name, block), ("attn_stack", "resid_mid"), ("resid_mid", "resid_post"), strict=True
    ):
        before = stacked(name, seen[f"{stack}.{layer}"])
        collapse, write, mix = coefficients(name, module, before)
        read, written = served(name, f"{short}_stream_collapse.{layer}", f"{short}_stream_write.{layer}")
        assert close(read, collapse)
        assert close(written, write)
        kept = before.double()
        if mix is None:
            assert "not mixed" in (loaded(name).refuses(f"{short}_stream_mix.{layer}") or "")
        else:
            (matrix,) = served(name, f"{short}_stream_mix.{layer}")
            assert close(matrix, mix)
            assert close(matrix.sum(-2), torch.ones(2, N_POS, kept.shape[-2]))
            kept = torch.einsum("bpij,bpid->bpjd", mix, kept)
        (added,) = served(name, f"{short}_out_post.{layer}")
        total = kept + write[..., None] * added.double()[..., None, :]
        assert close(stacked(name, seen[f"{after}.{layer}"]), total)


@ALL
@pytest.mark.parametrize("layer", range(3))
def test_the_points_inside_the_sublayers_are_their_modules_own(name, layer):
    seen = forward(name)
    for address in (f"attn_in.{layer}", f"mlp_in.{layer}", f"mlp_out.{layer}"):
        assert torch.equal(*served(name, address), seen[address])
    contribution, out = served(name, f"attn_out_post.{layer}", f"attn_out.{layer}")
    assert torch.equal(out, seen[f"attn_out.{layer}"])
    assert torch.equal(contribution, out)


@pytest.mark.parametrize("length", [6, N_POS, 21])
@pytest.mark.parametrize("name", ["mean", "kept", "gated"])
def test_attention_behind_an_indexer_is_its_modules_own_at_every_length(name, length):
    model, ids = loaded(name), families.token_ids(2, length, seed=3)
    attention = mixer(blocks(model.hf)[LAYER])
    seen: dict[str, Tensor] = {}
    handles = [
        attention.register_forward_hook(lambda _, __, out: seen.update(probs=out[1])),
        attention.o_proj.register_forward_hook(lambda _, args, __: seen.update(z=args[0])),
    ]
    with torch.no_grad():
        model.hf(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    cache = model.capture(ids, [f"attn_probs.{LAYER}", f"z.{LAYER}"])
    assert torch.equal(cache[f"z.{LAYER}"], seen["z"])
    assert torch.equal(cache[f"attn_probs.{LAYER}"], seen["probs"][..., :length])


@ALL
def test_the_streams_are_merged_before_the_final_norm(name):
    model, seen = loaded(name), forward(name)
    trunk: Any = getattr(model.hf.model, "language_model", model.hf.model)
    head, logits = served(name, "lm_head", "logits")
    assert torch.equal(head, seen["lm_head"])
    assert torch.equal(logits, seen["logits"])
    last = seen[f"resid_post.{LAST}"]
    if name == "gated":
        assert "norm" in (model.refuses("final_norm") or "")
        assert close(seen["head_in"], trunk.hyper_connection_mixer(last).detach())
        with pytest.raises(locant.PointUnavailable):
            model.unembed(torch.zeros(1, WIDTH))
        return
    merged = trunk.hc_head(last)
    (norm,) = served(name, "final_norm")
    assert torch.equal(norm, seen["head_in"])
    assert close(norm, trunk.norm(merged).detach())
    assert close(model.unembed(merged), seen["logits"])


@ALL
def test_every_point_of_the_streams_is_proven_and_each_served_address_is_captured(name):
    model = loaded(name)
    rows = {row.address: row for row in model.points()}
    absent = set() if name in ("mixed", "mean") else {"attn_stream_mix", "mlp_stream_mix"}
    for point, row in locant.POINTS.items():
        if row.takes_stream or row.needs == "streams":
            own = [rows[a] for a in rows if a.name == point]
            assert len(own) == 3 * (model.facts.n_streams if row.takes_stream and point != "resid_streams" else 1)
            assert {r.proof for r in own} == ({"not applicable"} if point in absent else {"proven"})
    logits, cache = model.run_with_cache(IDS)
    assert set(cache) == {a for a, row in rows.items() if row.served}
    assert torch.equal(logits, forward(name)["logits"])
    for address, tensor in cache.items():
        axes = locant.POINTS[address.name].axes
        assert tensor.dim() == 1 + len(axes) - ("head" in axes and "neuron" in axes), address


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_proves_the_same_points_and_reads_the_modules_own_tensors(name, dtype):
    model = locant.load_model(fresh(name).to(dtype))
    proven = {row.address for row in model.points() if row.proof == "proven"}
    streams = {p for p, point in locant.POINTS.items() if point.takes_stream or point.needs == "streams"}
    around = streams | {"attn_in", "mlp_in", "attn_out_post", "mlp_out_post", "logits"}
    assert {row.address for row in loaded(name).points() if row.served and row.address.name in around} <= proven
    block = blocks(model.hf)[LAYER]
    seen = hooked(model, {"out": (block, "output"), "added": (mixer(block), "output")})
    cache = model.capture(IDS, [f"resid_streams.{LAYER}", f"attn_out_post.{LAYER}"])
    assert torch.equal(cache[f"resid_streams.{LAYER}"], stacked(name, seen["out"]))
    assert torch.equal(cache[f"attn_out_post.{LAYER}"], seen["added"])


@ALL
def test_a_residual_without_its_stream_is_refused_and_says_what_to_write(name):
    n, model = MODELS[name][2], loaded(name)
    for point in ("resid_pre", "resid_mid", "resid_post"):
        with pytest.raises(locant.PointUnavailable, match=f"{n} streams.*{point}.1.stream-{n - 1}.*resid_streams.1"):
            model.capture(IDS, f"{point}.1")
    with pytest.raises(locant.PointUnavailable, match=f"{n} residual streams, 0 to {n - 1}"):
        model.capture(IDS, f"resid_post.1.stream-{n}")
    with pytest.raises(locant.PointUnavailable, match=f"0 to {n - 1}"):
        model.capture(IDS, f"resid_streams.1.stream-{n}")
    assert model.refuses("resid_post.1.stream-0") is None


@ALL
def test_loading_leaves_the_model_as_it_is(name):
    hf = fresh(name)
    with torch.no_grad():
        before = hf(input_ids=IDS, use_cache=False).logits
        locant.load_model(hf).capture(IDS, ["resid_post.1.stream-1", "attn_stream_write.1"])
        after = hf(input_ids=IDS, use_cache=False).logits
    assert torch.equal(before, after)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in hf.modules())


@ALL
def test_streams_are_told_by_the_residual_and_not_by_the_config(name):
    hf = fresh(name)
    config = hf.config.get_text_config()
    field = "hc_count" if name == "gated" else "hc_mult"
    hf.register_forward_pre_hook(lambda *_: setattr(config, field, MODELS[name][2]))
    hf.register_forward_hook(lambda *_: setattr(config, field, 1))  # what anyone sees who asks between forwards
    setattr(config, field, 1)
    assert locant.load_model(hf).facts.n_streams == MODELS[name][2]


@ALL
@pytest.mark.parametrize("short", ["attn", "mlp"])
def test_weights_that_are_all_alike_prove_nothing(name, short):
    hf = fresh(name)
    for block in blocks(hf):
        module = connections(name, block)[short == "mlp"]
        with torch.no_grad():
            if name == "gated":
                module.block_inject_weight.weight.zero_()
            else:
                module.scale.zero_()
                module.base.zero_()
    model = locant.load_model(hf)
    points = [f"{short}_stream_write.1"] + ([f"{short}_stream_mix.1"] if name in ("mixed", "mean") else [])
    for point in points:
        assert model.points()[point].proof == "vacuous"
        assert "prove nothing" in (model.refuses(point) or "")
    assert model.refuses(f"{'attn' if short == 'mlp' else 'mlp'}_stream_write.1") is None
    assert model.refuses("resid_post.1.stream-0") is None


@pytest.mark.parametrize(
    ("name", "point"),
    [(name, point) for name in MODELS for point in ("stream_collapse", "stream_write", "out_post")]
    + [("mixed", "stream_mix"), ("mean", "stream_mix")],
)
def test_a_stream_point_read_at_the_other_sublayer_is_refused(name, point, monkeypatch):
    hf = fresh(name)
    anatomy = survey(hf)
    sites = dict(anatomy.blocks[LAYER].sites)
    sites[f"attn_{point}"] = sites[f"mlp_{point}"]
    changed = [replace(b, sites=sites) if i == LAYER else b for i, b in enumerate(anatomy.blocks)]
    monkeypatch.setattr("locant.engine.eager.model.survey", lambda _: replace(anatomy, blocks=tuple(changed)))
    row = locant.load_model(hf).points()[f"attn_{point}.{LAYER}"]
    assert not row.served
    assert row.proof == "refused"


@pytest.mark.parametrize("name", ["mixed", "mean"])
@pytest.mark.parametrize("layer", range(3))
def test_the_matrix_taken_the_other_way_round_is_refused_in_the_first_layer_too(name, layer, monkeypatch):
    hf = fresh(name)
    anatomy = survey(hf)
    site = anatomy.blocks[layer].sites["attn_stream_mix"]
    read = type(site.view).read

    def transposed(view: Any, tensor: Tensor, batch: int) -> Tensor:
        got = read(view, tensor, batch)
        return got.transpose(-1, -2) if view is site.view else got

    monkeypatch.setattr(type(site.view), "read", transposed)
    monkeypatch.setattr("locant.engine.eager.model.survey", lambda _: anatomy)
    assert locant.load_model(hf).points()[f"attn_stream_mix.{layer}"].proof == "refused"


@ALL
def test_the_gradient_of_one_stream_is_that_of_the_model(name):
    model = loaded(name)
    cache = model.capture(IDS, ["resid_post.0.stream-1", "logits"], grad=True)
    (got,) = torch.autograd.grad(cache["logits"].square().sum(), cache["resid_post.0.stream-1"])
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        kept.append((out if isinstance(out, Tensor) else out[0]).detach().requires_grad_(True))
        return kept[0] if isinstance(out, Tensor) else (kept[0], *out[1:])

    handle = blocks(model.hf)[0].register_forward_hook(keep)
    logits = model.hf(input_ids=IDS, use_cache=False).logits
    handle.remove()
    (wanted,) = torch.autograd.grad(logits.square().sum(), kept[0])
    assert close(got, stacked(name, wanted)[:, :, 1])


@ALL
def test_prompts_of_other_lengths_and_chosen_positions_read_the_same_rows(name):
    model, addresses = loaded(name), ["resid_post.1.stream-2", "attn_stream_write.1", "resid_streams.1"]
    short, long = IDS[0, :4].tolist(), IDS[1].tolist()
    both, alone = model.capture([short, long], addresses), model.capture([short], addresses)
    chosen = model.capture([long], addresses, positions=[-1])
    for address in addresses:
        assert close(both.prompt(0)[address], alone[address])
        assert close(chosen[address], both.prompt(1)[address][:, -1:])


@ALL
def test_a_stream_is_an_axis_that_a_locator_enumerates(name):
    model, n = loaded(name), MODELS[name][2]
    made = []
    for fields in (
        {"activation": "resid.post", "location": ["layer", "stream"], "filter": [{"layer": 1}]},
        {"activation": "resid_streams.1", "location": ["stream"]},
    ):
        locator = locant.ModelLocatorConfig.from_config(fields)
        index = locant.Index(locator, locator.parse(model, N_POS))
        made.append(index.read(model.capture(IDS, index.addresses)).stack())
    assert torch.equal(*made)
    assert len(made[0]) == n
    with pytest.raises(locant.LocatorError, match="stream"):
        locant.ModelLocatorConfig("resid.post", ["layer"]).parse(model, N_POS)


@ALL
def test_one_stream_is_edited_alone_and_coefficients_not_at_all(name):
    model = loaded(name)
    step, n = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)), model.facts.n_streams
    ids = families.token_ids()

    def add(_: nn.Module, __: Any, output: Any) -> Any:
        tensor = (output if isinstance(output, Tensor) else output[0]).clone()
        stack = tensor if tensor.dim() == 4 else tensor.unflatten(-1, (n, -1))
        stack[:, :, 1] += step
        return tensor if isinstance(output, Tensor) else (tensor, *output[1:])

    clean = model.capture(ids, "logits")["logits"]
    hook = blocks(model.hf)[1].register_forward_hook(add)
    with torch.no_grad():
        wanted = model.hf(input_ids=ids, use_cache=False).logits
    hook.remove()
    for address in ("resid_post.1.stream-1", "resid_streams.1.stream-1"):
        got = model.capture(ids, "logits", edits=locant.Edit(address, locant.Add(step)))["logits"]
        assert close(got, wanted)
        assert not close(got, clean)
    for address in model.points().served():
        if "mix" in address.name or "write" in address.name:
            with pytest.raises(locant.PointUnavailable, match="coefficient"):
                model.capture(ids, "logits", edits=locant.Edit(address, locant.Set(0.0)))
