"""Edits, against the same forward pass computed from the weights alone with the point changed there."""

import threading
from types import MethodType

import pytest
import torch
from torch import Tensor

import families
import locant
from comparing import assert_close, errors
from families import fresh, loaded, token_ids
from locant import Add, Address, AddScaled, Apply, Cap, Edit, Scale, Set, Swap, Where
from reference import Reference
from tokenizing import TEXTS, words

ROUTES = pytest.mark.parametrize(("family", "attention"), families.ROUTES)
READ_ONLY = {"expert_indices"}


def vector(width: int, seed: int = 0) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def by_hand(model, ids, change) -> dict[str, Tensor]:
    return Reference(model.hf)(ids, change)


def same(model, ids, edits, change, addresses=("resid_post.1", "resid_post.2", "logits")) -> None:
    """An edited forward is the forward by hand with `change` in it, and not the unedited one."""
    cache = model.capture(ids, list(addresses), edits=edits)
    wanted, plain = by_hand(model, ids, change), by_hand(model, ids, {})
    for address, tensor in cache.items():
        assert_close(tensor, wanted[str(address)], address)
    last = str(list(cache)[-1])
    assert errors(wanted[last], plain[last])[0] > 1e-3, "the edit changes nothing"


# ---- every point of every family


@ROUTES
def test_every_point_can_be_written_and_all_that_follows_sees_it(family, attention):
    model, ids = loaded(family, attention), token_ids()
    points = model.points().served()
    # a point of each kind at each layer, every one of them once
    for at, address in enumerate(points):
        if address.name in READ_ONLY or (address.layer is not None and address.layer != at % families.LAYERS):
            continue
        clean = model.capture(ids, address)[address]
        matrix = address.name in ("attn_scores", "attn_probs")
        added = torch.randn(clean.shape, generator=torch.Generator().manual_seed(at)) * 0.7
        if matrix:
            added = added.tril() * 0.3
        cache = model.capture(ids, points, edits=Edit(address, Add(added)))
        wanted = by_hand(model, ids, {str(address): lambda x, v=added: x + v})
        plain = by_hand(model, ids, {})
        for got, tensor in cache.items():
            if got.name == "expert_indices":
                continue
            assert_close(tensor, wanted[str(got)], f"{got} with {address} edited")
        assert errors(wanted["logits"], plain["logits"])[0] > 1e-4, address


@ROUTES
def test_what_cannot_be_written_says_so_before_any_forward(family, attention):
    model = loaded(family, attention)
    indices = [a for a in model.points().served() if a.name == "expert_indices"]
    ran = []
    hook = model.hf.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        for address in indices:
            with pytest.raises(locant.PointUnavailable, match="integer choice"):
                model.capture(token_ids(), "logits", edits=Edit(address, Set(0.0)))
        assert not ran
    finally:
        hook.remove()


def test_the_routing_of_experts_follows_edited_router_logits():
    model, ids = loaded("mixtral"), token_ids()
    favoured = torch.zeros(5)
    favoured[3] = 100.0
    cache = model.capture(ids, ["expert_indices.1"], edits=Edit("router_logits.1", Add(favoured)))
    assert bool((cache["expert_indices.1"][..., 0] == 3).all())


# ---- against hooks of one's own


def test_the_middle_residual_reaches_the_mlp_and_the_skip():
    model, ids, v = loaded("llama"), token_ids(), vector(families.WIDTH)
    block = model.hf.model.layers[1]
    hooks = [
        block.post_attention_layernorm.register_forward_pre_hook(lambda _, args: (args[0] + v,)),
        block.register_forward_hook(lambda _, __, out: out + v),  # the skip connection's share
    ]
    with torch.no_grad():
        wanted = model.hf(ids, use_cache=False).logits
        hooks.pop().remove()
        only_mlp = model.hf(ids, use_cache=False).logits
    hooks.pop().remove()
    got = model.capture(ids, "logits", edits=Edit("resid_mid.1", Add(v)))["logits"]
    assert_close(got, wanted)
    assert errors(only_mlp, wanted)[0] > 1e-3


def test_a_contribution_is_written_with_its_multiplier():
    model, ids, v = loaded("granite"), token_ids(), vector(families.WIDTH)
    down = model.hf.model.layers[1].mlp.down_proj
    hook = down.register_forward_hook(lambda _, __, out: out + v / 0.22)
    with torch.no_grad():
        wanted = model.hf(ids, use_cache=False).logits
    hook.remove()
    got = model.capture(ids, ["mlp_out.1", "mlp_out_post.1", "logits"], edits=Edit("mlp_out_post.1", Add(v)))
    assert_close(got["logits"], wanted)
    clean = model.capture(ids, ["mlp_out.1", "mlp_out_post.1"])
    assert_close(got["mlp_out_post.1"], clean["mlp_out_post.1"] + v)


def test_the_channels_beside_a_fused_slice_keep_their_bits():
    for family in ("gpt2", "phi3", "falcon_grouped", "gpt_neox"):
        model, ids = loaded(family), token_ids()
        names = ["query.1", "key.1", "value.1"]
        clean = model.capture(ids, names)
        for edited in names:
            cache = model.capture(ids, names, edits=Edit(edited, Set(0.5)))
            for name in names:
                wanted = torch.full_like(clean[name], 0.5) if name == edited else clean[name]
                assert torch.equal(cache[name], wanted), (family, edited, name)


def test_a_parallel_block_hands_the_edited_input_to_one_sublayer_alone():
    model, ids = loaded("gptj"), token_ids()
    clean = model.capture(ids, ["attn_in.1", "mlp_in.1"])
    assert torch.equal(clean["attn_in.1"], clean["mlp_in.1"])
    cache = model.capture(ids, ["attn_in.1", "mlp_in.1"], edits=Edit("attn_in.1", Add(vector(families.WIDTH))))
    assert torch.equal(cache["mlp_in.1"], clean["mlp_in.1"])
    assert not torch.equal(cache["attn_in.1"], clean["attn_in.1"])


def test_the_input_of_an_mlp_without_a_norm_is_not_the_residual():
    model, ids, v = loaded("olmo2"), token_ids(), vector(families.WIDTH)
    same(model, ids, Edit("mlp_in.1", Add(v)), {"mlp_in.1": lambda x: x + v}, ["resid_mid.1", "resid_post.1"])
    same(model, ids, Edit("resid_mid.1", Add(v)), {"resid_mid.1": lambda x: x + v}, ["mlp_in.1", "resid_post.1"])


# ---- operations, each by its formula


D = vector(families.WIDTH, 3)
T = vector(families.WIDTH, 4)
UNIT, TARGET = D / D.norm(), T / T.norm()


def projected(x: Tensor) -> Tensor:
    return (x @ UNIT)[..., None] * UNIT


OPERATIONS = {
    "add": (Add(D, 0.5), lambda x: x + 0.5 * D),
    "add a number": (Add(0.5), lambda x: x + 0.5),
    "ablate": (Scale(D), lambda x: x - projected(x)),
    "double": (Scale(D, 2.0), lambda x: x + projected(x)),
    "cap both": (Cap(D, -0.2, 0.3), lambda x: x - projected(x) + (x @ UNIT).clamp(-0.2, 0.3)[..., None] * UNIT),
    "cap above": (Cap(D, max=0.1), lambda x: x - projected(x) + (x @ UNIT).clamp(max=0.1)[..., None] * UNIT),
    "swap": (Swap(D, T), lambda x: x - projected(x) + (x @ UNIT)[..., None] * TARGET),
    "set": (Set(D), D.expand_as),
    "zero": (Set(0.0), torch.zeros_like),
    "scaled": (AddScaled(UNIT, 0.3), lambda x: x + 0.3 * x.norm(dim=-1, keepdim=True) * UNIT),
    "scaled, limited": (AddScaled(D, 9.0, 0.5), lambda x: x + 0.5 * x.norm(dim=-1, keepdim=True) * UNIT),
    "function": (Apply(lambda x: x.flip(-1)), lambda x: x.flip(-1)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_operations(family, operation):
    made, formula = OPERATIONS[operation]
    same(loaded(family), token_ids(), Edit("resid_post.1", made), {"resid_post.1": formula})


def test_scaling_by_one_and_a_cap_out_of_reach_change_nothing():
    model, ids = loaded("llama"), token_ids()
    clean = model.capture(ids, "logits")["logits"]
    for operation in (Scale(D, 1.0), Cap(D, -1e9, 1e9), Add(torch.zeros(families.WIDTH))):
        assert torch.equal(model.capture(ids, "logits", edits=Edit("resid_post.1", operation))["logits"], clean)


def test_another_runs_activation_makes_this_run_that_run():
    model = loaded("llama")
    ids, other = token_ids(seed=1), token_ids(seed=2)
    donor = model.capture(other, ["resid_pre.1", "logits"])
    cache = model.capture(ids, ["logits"], edits=Edit("resid_pre.1", Set(donor["resid_pre.1"])))
    assert torch.equal(cache["logits"], donor["logits"])


def test_a_small_step_is_not_lost_in_bfloat16():
    model, ids = loaded("llama", None, torch.bfloat16), token_ids()
    clean = model.capture(ids, "resid_post.0")["resid_post.0"]
    step = torch.full((families.WIDTH,), 1e-3)
    got = model.capture(ids, "resid_post.0", edits=Edit("resid_post.0", Add(step)))["resid_post.0"]
    assert torch.equal(got, (clean.float() + step).bfloat16())
    third = Scale(torch.ones(families.WIDTH), 1 / 3)
    got = model.capture(ids, "resid_post.0", edits=Edit("resid_post.0", third))["resid_post.0"]
    wanted = (clean.double() - 2 / 3 * clean.double().mean(-1, keepdim=True)).bfloat16()
    narrow = clean - 2 / 3 * clean.mean(-1, keepdim=True)
    assert float((got != wanted).float().mean()) < 0.01 < float((narrow != wanted).float().mean())


def test_edits_of_one_address_follow_the_order_given():
    model, ids = loaded("llama"), token_ids()
    double, add = Edit("mlp_out.1", Apply(lambda x: 2 * x)), Edit("mlp_out.1", Add(1.0))
    same(model, ids, [double, add], {"mlp_out.1": lambda x: 2 * x + 1})
    same(model, ids, [add, double], {"mlp_out.1": lambda x: 2 * (x + 1)})
    other = Edit("resid_pre.1", Add(D))
    same(model, ids, [double, other], {"mlp_out.1": lambda x: 2 * x, "resid_pre.1": lambda x: x + D})


# ---- where


def test_positions_and_prompts_of_a_ragged_batch():
    model = loaded("llama")
    prompts = [token_ids(1, n, seed=n)[0].tolist() for n in (9, 4, 6)]
    cases = {
        "all": (Where(), [range(9), range(4), range(6)]),
        "last": (Where(positions=-1), [[8], [3], [5]]),
        "some": (Where(positions=[0, -2]), [[0, 7], [0, 2], [0, 4]]),
        "range": (Where(positions=range(1, 4)), [range(1, 4)] * 3),
        "but": (Where(except_positions=[0, -1]), [range(1, 8), range(1, 3), range(1, 5)]),
        "one prompt": (Where(prompts=1), [[], range(4), []]),
        "past the shorter prompts": (Where(prompts=[0, -1], positions=[5]), [[5], [], [5]]),
    }
    for case, (where, rows) in cases.items():
        cache = model.capture(prompts, ["resid_post.2"], edits=Edit("resid_post.0", Add(D), where))
        for i, ids in enumerate(prompts):

            def change(x, at=tuple(rows[i])):
                x = x.clone()
                x[:, list(at)] += D
                return x

            wanted = by_hand(model, torch.tensor([ids]), {"resid_post.0": change})
            assert_close(cache.prompt(i)["resid_post.2"], wanted["resid_post.2"], (case, i))


def test_special_tokens_can_be_left_alone():
    model = locant.load_model(families.tiny("llama"), tokenizer=words())
    edit = Edit("resid_post.1", Set(0.0), Where(special_tokens=False))
    cache = model.capture(TEXTS, "resid_post.1", edits=edit)
    clean = model.capture(TEXTS, "resid_post.1")
    special = set(model.tokenizer.all_special_ids)
    for i, ids in enumerate(cache.tokens):
        kept = torch.tensor([token in special for token in ids])
        assert bool(kept.any())
        got, before = (c.prompt(i)["resid_post.1"][0] for c in (cache, clean))
        assert torch.equal(got[kept], before[kept])
        assert bool((got[~kept] == 0).all())
    with pytest.raises(locant.EditError, match="tokenizer"):
        loaded("llama").capture(token_ids(), "logits", edits=edit)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "qwen3", "phi3"])
def test_heads_are_heads_and_positions_positions_on_norms_of_any_layout(family):
    """Some norms of queries see [batch, head, pos, d], where a mask of positions would fall on the heads."""
    model, ids = loaded(family), token_ids()
    names = [a for a in ("q_norm_out.1", "query_rotated.1", "z.1") if not model.refuses(a)]
    for name in names:

        def change(x):
            x = x.clone().unflatten(-1, (families.HEADS, -1))
            x[:, [2, 5], 1] = 0.25
            return x.flatten(-2)

        edit = Edit(name, Set(0.25), Where(positions=[2, 5], heads=1))
        same(model, ids, edit, {name: change}, [name, "resid_post.1"])


def test_neurons_of_an_mlp_and_of_a_head():
    model, ids = loaded("llama"), token_ids()

    def silence(x):
        x = x.clone()
        x[..., [3, -1]] = 0
        return x

    same(model, ids, Edit("mlp_act.1", Set(0.0), Where(neurons=[3, -1])), {"mlp_act.1": silence})

    def of_heads(x):
        x = x.clone().unflatten(-1, (families.HEADS, 16))
        x[..., [0, 2], 5] = torch.tensor([7.0, 8.0])
        return x.flatten(-2)

    two = Set(torch.tensor([7.0, 8.0]))
    same(model, ids, Edit("z.1", two, Where(heads=[0, 2], neurons=5)), {"z.1": of_heads})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_knocked_out_between_two_tokens(attention):
    model, ids = loaded("llama", attention), token_ids()

    def cut(x):
        x = x.clone()
        x[:, [1, 3], 6, 2] = -1e9
        return x

    where = Where(positions=6, keys=2, heads=[1, 3])
    same(model, ids, Edit("attn_scores.1", Set(-1e9), where), {"attn_scores.1": cut}, ["attn_probs.1", "logits"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_set_to_one_number_stay_causal(attention):
    model, ids = loaded("llama", attention), token_ids()
    probs = model.capture(ids, "attn_probs.1", edits=Edit("attn_scores.1", Set(0.0)))["attn_probs.1"]
    uniform = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    assert_close(probs, uniform.expand_as(probs))


def test_a_vector_for_each_position_and_for_each_prompt():
    model, ids = loaded("llama"), token_ids(3)
    each = torch.randn(3, 9, families.WIDTH, generator=torch.Generator().manual_seed(5))
    for shape in ((3, 9), (1, 9), (3, 1)):
        v = each[: shape[0], : shape[1]]
        same(model, ids, Edit("resid_post.0", Add(v)), {"resid_post.0": lambda x, v=v: x + v})

    def placed(x):
        x = x.clone()
        x[1, [7, 2]] += each[1, :2]
        return x

    where = Where(prompts=1, positions=[-2, 2])
    same(model, ids, Edit("resid_post.0", Add(each[1:2, :2]), where), {"resid_post.0": placed})


# ---- bad input, before any forward

W = families.WIDTH
BAD = {
    "too wide": lambda: Edit("resid_post.0", Add(torch.ones(W + 1))),
    "one number as a vector": lambda: Edit("resid_post.0", Add(torch.ones(1))),
    "rows for a vector": lambda: Edit("resid_post.0", Add(torch.ones(9, W))),
    "too many positions": lambda: Edit("resid_post.0", Add(torch.ones(1, 8, W))),
    "too many prompts": lambda: Edit("resid_post.0", Add(torch.ones(3, 1, W))),
    "NaN in a vector": lambda: Edit("resid_post.0", Add(torch.full((W,), float("nan")))),
    "inf at a position": lambda: Edit("resid_post.0", Set(torch.full((2, 9, W), float("inf")))),
    "inf scale": lambda: Edit("resid_post.0", Add(torch.ones(W), float("inf"))),
    "NaN factor": lambda: Edit("resid_post.0", Scale(torch.ones(W), float("nan"))),
    "min above max": lambda: Edit("resid_post.0", Cap(torch.ones(W), 1.0, 0.0)),
    "no bounds": lambda: Edit("resid_post.0", Cap(torch.ones(W))),
    "no direction": lambda: Edit("resid_post.0", Scale(torch.zeros(W))),
    "a position past the prompt": lambda: Edit("resid_post.0", Set(0.0), Where(positions=9)),
    "no positions": lambda: Edit("resid_post.0", Set(0.0), Where(positions=[])),
    "a prompt past the batch": lambda: Edit("resid_post.0", Set(0.0), Where(prompts=2)),
    "heads of a residual": lambda: Edit("resid_post.0", Set(0.0), Where(heads=0)),
    "a head too many": lambda: Edit("z.0", Set(0.0), Where(heads=4)),
    "a head twice": lambda: Edit("z.0", Set(0.0), Where(heads=[1, -3])),
    "a neuron too many": lambda: Edit("mlp_act.0", Set(0.0), Where(neurons=80)),
    "keys of a residual": lambda: Edit("resid_post.0", Set(0.0), Where(keys=0)),
    "neurons of a matrix": lambda: Edit("attn_probs.0", Set(0.0), Where(neurons=0)),
    "a direction in a matrix": lambda: Edit("attn_probs.0", Scale(torch.ones(9))),
    "part of a matrix": lambda: Edit("attn_probs.0", Set(torch.ones(9, 9))),
    "no such layer": lambda: Edit("resid_post.9", Set(0.0)),
    "no such module": lambda: Edit("model.nowhere", Set(0.0)),
    "no operation": lambda: Edit("resid_post.0", torch.ones(W)),
    "no edit": lambda: ["resid_post.0"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_edits_are_refused_before_any_forward(case):
    model, ran = loaded("llama"), []
    model.capture(token_ids(), "logits", edits=[Edit(f"{n}.0", Set(0.0)) for n in ("resid_post", "z", "mlp_act")])
    model.capture(token_ids(), "logits", edits=Edit("attn_probs.0", Set(0.0)))  # proven from here on
    hook = model.hf.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(locant.LocantError):
            model.capture(token_ids(), "logits", edits=BAD[case]())
        assert not ran
    finally:
        hook.remove()


# ---- nothing outlives a call


def hooks_of(hf) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hf.modules())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_edit_outlives_a_failure(error):
    model = locant.EagerModel(fresh("llama"))
    clean = model.capture(token_ids(), "logits")["logits"]

    def fail(_: Tensor) -> Tensor:
        raise error

    for address in ("resid_mid.1", "attn_scores.1", "query_rotated.1"):
        with pytest.raises(error):
            model.capture(token_ids(), "logits", edits=[Edit("resid_post.0", Set(0.0)), Edit(address, Apply(fail))])
        assert hooks_of(model.hf) == 0
        assert torch.equal(model.capture(token_ids(), "logits")["logits"], clean)
    with torch.no_grad():
        assert torch.equal(model.hf(token_ids(), use_cache=False).logits, clean)


def test_a_capture_that_stops_before_an_edit_is_the_clean_one():
    model, ids = loaded("llama"), token_ids()
    clean = model.capture(ids, "resid_post.0")["resid_post.0"]
    assert torch.equal(model.capture(ids, "resid_post.0", edits=Edit("resid_post.2", Set(0.0)))["resid_post.0"], clean)


def test_what_was_read_before_an_edit_in_place_keeps_its_value():
    model, ids = loaded("gpt2"), token_ids()
    names = ["resid_pre.1", "attn_out.1", "attn_out_post.1"]
    clean = model.capture(ids, names)
    cache = model.capture(ids, [*names, "resid_post.1"], edits=Edit("resid_mid.1", Set(0.0)))
    for name in names:
        assert torch.equal(cache[name], clean[name])


def test_threads_do_not_see_each_others_edits():
    model, ids = locant.EagerModel(fresh("llama")), token_ids()
    wanted = {c: by_hand(model, ids, {"resid_post.1": lambda x, c=c: x + c})["logits"] for c in (0.0, 1.0, 2.0)}
    wrong = []

    def run(c: float) -> None:
        for _ in range(10):
            got = model.capture(ids, "logits", edits=[Edit("resid_post.1", Add(c))] if c else [])["logits"]
            if errors(got, wanted[c])[0] > 1e-4:
                wrong.append(c)

    threads = [threading.Thread(target=run, args=(c,)) for c in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_tensors_of_an_edit_are_not_changed():
    v = torch.randn(1, 9, families.WIDTH)
    kept = v.clone()
    loaded("llama").capture(token_ids(), "logits", edits=Edit("resid_mid.1", Set(v), Where(positions=range(9))))
    assert torch.equal(v, kept)


# ---- modules, plans, gradients


def test_a_modules_output_by_its_path():
    model, ids = loaded("llama"), token_ids()
    edit = Edit("model.layers.1.mlp.up_proj", Add(vector(families.NEURONS)))
    same(model, ids, edit, {"mlp_pre_linear.1": lambda x: x + vector(families.NEURONS)})
    with pytest.raises(locant.EditError, match="80 wide"):
        model.capture(ids, "logits", edits=Edit("model.layers.1.mlp.up_proj", Add(torch.ones(3))))


@pytest.mark.parametrize("address", ["resid_post.0", "resid_mid.1", "mlp_out_post.1", "attn_scores.1", "z.1"])
@pytest.mark.parametrize(("family", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("granite", "eager")])
def test_the_gradient_of_an_edits_vector_is_what_small_steps_say(address, family, attention):
    model, ids = loaded(family, attention), token_ids(1, 5)
    shape = model.capture(ids, address)[address].shape
    matrix = address.startswith("attn")
    v = torch.zeros(shape if matrix else shape[-1:], requires_grad=True)

    def score(vector: Tensor, grad: bool) -> Tensor:
        cache = model.capture(ids, "logits", edits=Edit(address, Add(vector)), grad=grad)
        return cache["logits"].double()[0, -1, :5].sum()

    (slope,) = torch.autograd.grad(score(v, True), v)
    step = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    step = step.tril() if matrix else step
    eps = 1e-2
    with torch.no_grad():
        difference = (score(eps * step, False) - score(-eps * step, False)) / (2 * eps)
    assert float(slope.abs().max()) > 0
    assert float((slope * step).sum()) == pytest.approx(float(difference), rel=2e-2, abs=1e-3)


def test_the_gradient_of_an_edited_point_is_that_of_its_new_value():
    model, ids = loaded("llama"), token_ids(1, 5)
    cache = model.capture(ids, ["resid_mid.1", "logits"], edits=Edit("resid_mid.1", Add(D)), grad=True)
    (slope,) = torch.autograd.grad(cache["logits"].square().sum(), cache["resid_mid.1"])
    mid = cache["resid_mid.1"].detach()
    step = torch.randn(mid.shape, generator=torch.Generator().manual_seed(2)) * 1e-2

    def loss(x: Tensor) -> float:
        return float(model.capture(ids, "logits", edits=Edit("resid_mid.1", Set(x)))["logits"].double().square().sum())

    difference = loss(mid + step) - loss(mid - step)
    assert 2 * float((slope * step).sum()) == pytest.approx(difference, rel=2e-2)


def test_a_plan_says_what_it_changes():
    model = loaded("llama")
    assert "changes resid_mid.1" in str(model.plan("logits", Edit("resid_mid.1", Set(0.0))))
    assert "changes" not in str(model.plan("logits"))
    assert list(model.plan("logits", Edit("resid_mid.1", Set(0.0))).writes) == [Address("resid_mid", 1)]


def forward_with_a_copy(self, hidden_states, **given):
    """A Llama block whose skip connection takes a copy of what its second norm reads."""
    mixed, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
    middle = hidden_states + mixed
    return middle.clone() + self.mlp(self.post_attention_layernorm(middle))


def test_a_write_that_only_some_readers_see_is_refused_though_the_point_can_be_read():
    hf, ran = fresh("llama"), []
    for block in hf.model.layers:
        block.forward = MethodType(forward_with_a_copy, block)
    model = locant.EagerModel(hf)
    assert model.refuses("resid_mid.1") is None
    for _ in range(2):
        with pytest.raises(locant.PointUnavailable, match="does not hold for what was written: block_sum"):
            model.capture(token_ids(), "logits", edits=Edit("resid_mid.1", Set(0.0)))
        hf.register_forward_pre_hook(lambda *_: ran.append(1))  # the verdict is remembered
    assert not ran
    edit = Edit("mlp_in.1", Set(0.0))
    same(model, token_ids(), edit, {"mlp_in.1": torch.zeros_like})


# ---- steering specs

SPECS = {
    "add": (locant.AddSpec(D, 0.5), lambda x: x + 0.5 * D),
    "add, normalized": (locant.AddSpec(D, 3.0, normalize=True), lambda x: x + 3 * UNIT),
    "orthogonal": (locant.OrthogonalDecompSpec(D, 0.25), lambda x: x - 0.75 * projected(x)),
    "ablate": (locant.AblateSpec(D), lambda x: x - projected(x)),
    "cap": (locant.ProjectionCapSpec(D, max=0.1), OPERATIONS["cap above"][1]),
    "swap": (locant.SwapSpec(D, T), OPERATIONS["swap"][1]),
    "scaled": (locant.NormScaledAddSpec(D, 0.3, normalize=True), OPERATIONS["scaled"][1]),
    "operation": (Set(0.0), torch.zeros_like),
}


@pytest.mark.parametrize("spec", SPECS)
def test_steering_specs_are_edits_by_layer(spec):
    given, formula = SPECS[spec]
    model, ids = loaded("gemma3_text"), token_ids()
    steering = locant.SteeringSpec(layers={1: given, 2: locant.LayerSteeringSpec([given])}, point="attn_out_post")
    same(model, ids, steering, {f"attn_out_post.{layer}": formula for layer in (1, 2)})
    same(model, ids, locant.SteeringSpec.at("final_norm", given), {"final_norm": formula}, ["logits"])


def test_operations_of_one_layer_are_done_in_order():
    steering = locant.SteeringSpec({1: [locant.AblateSpec(D), locant.AddSpec(D)]})
    same(loaded("llama"), token_ids(), [steering], {"resid_post.1": lambda x: x - projected(x) + D})


def test_a_steering_spec_that_does_nothing_is_refused():
    for spec in (locant.SteeringSpec({}), locant.SteeringSpec({0: []}), locant.SteeringSpec({0: D})):
        with pytest.raises(locant.EditError):
            loaded("llama").capture(token_ids(), "logits", edits=spec)
    with pytest.raises(locant.EditError, match="no direction"):
        locant.AddSpec(torch.zeros(3), normalize=True).operation()
