"""The proof refuses a wrong tensor, whatever else is right: every test here reads some point at a wrong place."""

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch

import families
import locant
from comparing import errors
from families import loaded
from locant import Address
from locant.anatomy.anatomy import Anatomy
from locant.anatomy.evidence import Evidence
from locant.anatomy.proof import Verdict, prove
from locant.anatomy.sites import Channels, ModuleSite, OpSite, Site, View
from locant.anatomy.survey import survey
from locant.engine.eager.model import EagerModel

FAMILIES = pytest.mark.parametrize("family", families.FAMILIES)
LAYER = 1


def with_sites(anatomy: Anatomy, changes: Mapping[Address, Site]) -> Anatomy:
    """`anatomy` with some points read elsewhere."""
    trunk, blocks = anatomy.trunk, list(anatomy.blocks)
    for address, site in changes.items():
        if address.layer is None:
            trunk = replace(trunk, sites={**trunk.sites, address.name: site})
        else:
            block = blocks[address.layer]
            blocks[address.layer] = replace(block, sites={**block.sites, address.name: site})
    return replace(anatomy, trunk=trunk, blocks=tuple(blocks))


def with_block(anatomy: Anatomy, **changes: object) -> Anatomy:
    blocks = list(anatomy.blocks)
    blocks[LAYER] = replace(blocks[LAYER], **changes)
    return replace(anatomy, blocks=tuple(blocks))


def surveyed_as(monkeypatch: pytest.MonkeyPatch, hf: torch.nn.Module, anatomy: Anatomy) -> locant.EagerModel:
    """The model as it loads when the survey comes to `anatomy`."""
    monkeypatch.setattr("locant.engine.eager.model.survey", lambda _: anatomy)
    return locant.load_model(hf)


def assert_refused(model: locant.EagerModel, *names: str, layer: int | None = LAYER) -> None:
    for name in names:
        row = model.points()[name if layer is None else f"{name}.{layer}"]
        assert not row.served, f"{row.address} is served"
        assert row.proof == "refused"
        assert row.error > 1e-3
        assert "fails on this model (relative error " in row.reason
        with pytest.raises(locant.PointUnavailable, match="fails on this model"):
            model.capture([5, 6, 7], row.address)


# ---- two places that look alike, exchanged

NORMS_AFTER = ["gemma2", "gemma3_text", "olmo2"]
GATED = ["llama", "gemma2", "phi3"]
EQUAL_HEADS = ["gpt2", "gptj", "gpt_neox"]
SEQUENTIAL = ["gpt2", "llama", "gemma3_text", "olmo2"]

EXCHANGED = [
    *[(f, pair) for f in NORMS_AFTER for pair in (("attn_out", "attn_out_post"), ("mlp_out", "mlp_out_post"))],
    *[(f, ("mlp_pre", "mlp_pre_linear")) for f in GATED],
    *[(f, pair) for f in EQUAL_HEADS for pair in (("query", "key"), ("query_rotated", "key_rotated"))],
    *[(f, ("value", "key")) for f in ("gpt2", "llama", "phi3", "falcon")],
    *[(f, ("resid_mid", "resid_pre")) for f in SEQUENTIAL],
    *[(f, ("attn_in", "mlp_in")) for f in ("gpt2", "llama", "gpt_neox", "olmo2")],
    *[(f, ("attn_scores", "attn_probs")) for f in ("gpt2", "llama", "gemma2")],
    *[(f, ("attn_out_post", "mlp_out_post")) for f in ("gptj", "gpt_neox", "falcon")],
]


@pytest.mark.parametrize(
    ("family", "attention", "pair"),
    [(f, attention, pair) for f, pair in EXCHANGED for attention in families.attentions(f)],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_two_points_exchanged_are_both_refused(monkeypatch, family, attention, pair):
    hf = families.tiny(family, attention)
    anatomy = survey(hf)
    a, b = (Address(name, LAYER) for name in pair)
    wrong = with_sites(anatomy, {a: anatomy.site(b), b: anatomy.site(a)})
    assert_refused(surveyed_as(monkeypatch, hf, wrong), *pair)


@pytest.mark.parametrize("name", "resid_post attn_out attn_out_post value key z mlp_in mlp_act attn_probs".split())
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "gpt_neox"])
def test_a_point_exchanged_with_the_next_layers_is_refused_in_both(monkeypatch, family, name):
    hf = families.tiny(family)
    anatomy = survey(hf)
    a, b = Address(name, LAYER), Address(name, LAYER + 1)
    wrong = with_sites(anatomy, {a: anatomy.site(b), b: anatomy.site(a)})
    model = surveyed_as(monkeypatch, hf, wrong)
    assert_refused(model, name)
    assert_refused(model, name, layer=LAYER + 1)


def test_what_is_right_beside_a_wrong_point_is_still_served(monkeypatch):
    hf = families.tiny("llama")
    anatomy = survey(hf)
    wrong = with_sites(anatomy, {Address("mlp_act", 1): anatomy.site(Address("mlp_pre", 1))})
    model = surveyed_as(monkeypatch, hf, wrong)
    assert model.refuses("mlp_act.1")
    for address in ("mlp_act.0", "z.1", "resid_post.1", "attn_probs.1", "logits"):
        assert model.refuses(address) is None


# ---- any point at any other place


class Judge:
    """Judges the points of one model as if some of them were read elsewhere, from one forward."""

    def __init__(self, model: locant.EagerModel) -> None:
        self.anatomy, self._modules = model.anatomy, model.hf.get_submodule
        self.points = [a for a in self.anatomy.addresses() if a.layer in (None, LAYER)]
        ids = families.token_ids(batch=2, length=6)
        summands = [Address.of_module(path) for path in self.anatomy.entry.summands]
        self.tape = dict(model.capture(ids, [*self.anatomy.addresses(), *summands]))
        self._ids = ids

    def __call__(self, moved: Mapping[Address, Address]) -> dict[Address, Verdict]:
        anatomy = with_sites(self.anatomy, {a: self.anatomy.site(b) for a, b in moved.items()})
        tape = self.tape | {a: self.tape[b] for a, b in moved.items()}
        with torch.no_grad():
            return prove(Evidence(anatomy, tape, self._ids, self._modules))

    def wrong_places(self) -> Iterator[tuple[Address, Address]]:
        """A point, and a place with a tensor of its shape that is another: in its block, or its own elsewhere."""
        for a in self.points:
            for b in self.anatomy.addresses():
                near = a.layer is None or b.layer == a.layer or b.name == a.name
                if a != b and near and self._differ(self.tape[a], self.tape[b]):
                    yield a, b

    @staticmethod
    def _differ(x: torch.Tensor, y: torch.Tensor) -> bool:
        return x.shape == y.shape and x.dtype == y.dtype and errors(x, y)[0] > 1e-3


ONLY_OF_THEIR_SHAPE = {Address("lm_head"), Address("logits")}
"""Where a family caps no logits, these two are one tensor and no other has its shape."""


@cache
def judge(family: str) -> Judge:
    return Judge(loaded(family))


@FAMILIES
def test_a_point_read_anywhere_else_is_refused(family):
    judged = judge(family)
    elsewhere: dict[Address, list[Address]] = {}
    for a, b in judged.wrong_places():
        elsewhere.setdefault(a, []).append(b)
    assert elsewhere.keys() >= set(judged.points) - ONLY_OF_THEIR_SHAPE
    draw = random.Random(0)
    for a, places in elsewhere.items():
        for b in draw.sample(places, min(3, len(places))):
            assert judged({a: b})[a].state == "refused", f"{a} at {b}"


@FAMILIES
def test_two_points_read_at_each_others_place_are_refused(family):
    judged = judge(family)
    pairs = {frozenset(pair) for pair in judged.wrong_places()}
    for a, b in random.Random(0).sample(sorted(map(sorted, pairs)), 25):
        verdicts = judged({a: b, b: a})
        assert verdicts[a].state == verdicts[b].state == "refused", f"{a} and {b} exchanged"


@FAMILIES
def test_two_wrong_points_cannot_vouch_for_each_other(family):
    judged = judge(family)
    places = list(judged.wrong_places())
    both = [{a: b, c: d} for (a, b), (c, d) in combinations(places, 2) if a != c]
    for moved in random.Random(0).sample(both, 60):
        verdicts = judged(moved)
        assert {verdicts[a].state for a in moved} == {"refused"}, moved


VOUCHING = [
    (family, {"query": "key", "query_rotated": "key_rotated", "key": "query", "key_rotated": "query_rotated"})
    for family in ("gpt2", "gpt_neox", "gptj")
]
VOUCHING += [(f, {"query": "key", "query_rotated": "key_rotated"}) for f in ("gpt2", "gpt_neox")]
VOUCHING += [(f, {"key": "value", "key_rotated": "value"}) for f in ("gpt2", "phi3", "falcon")]
VOUCHING += [(f, {"attn_out": "mlp_out", "attn_out_post": "mlp_out_post"}) for f in ("gpt_neox", "gptj", "falcon")]
VOUCHING += [(f, {"attn_out": "resid_pre", "attn_out_post": "resid_pre"}) for f in ("gpt_neox", "gptj", "llama")]
VOUCHING += [("olmo2", {"resid_pre": "resid_mid", "attn_in": "mlp_in"})]
VOUCHING += [("olmo2", {"resid_mid": "resid_pre", "mlp_in": "attn_in"})]


@pytest.mark.parametrize(("family", "moved"), VOUCHING, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_points_that_are_wrong_in_agreement_are_refused(family, moved):
    moved = {Address(a, LAYER): Address(b, LAYER) for a, b in moved.items()}
    verdicts = judge(family)(moved)
    assert not [str(a) for a in moved if verdicts[a].state == "proven"]


@FAMILIES
def test_blocks_in_the_wrong_order_are_refused_with_all_that_is_in_them(monkeypatch, family):
    hf = families.tiny(family)
    anatomy = survey(hf)
    blocks = list(anatomy.blocks)
    i, j = next((i, j) for i, j in ((1, 2), (0, 2)) if set(blocks[i].sites) == set(blocks[j].sites))
    blocks[i], blocks[j] = blocks[j], blocks[i]
    model = surveyed_as(monkeypatch, hf, replace(anatomy, blocks=tuple(blocks)))
    assert not [str(a) for a in model.points().served() if a.layer in (i, j)]


def test_a_block_left_out_is_noticed(monkeypatch):
    hf = families.tiny("llama")
    anatomy = survey(hf)
    facts = replace(anatomy.facts, n_layers=2, layers=anatomy.facts.layers[:2])
    assert_refused(surveyed_as(monkeypatch, hf, replace(anatomy, blocks=anatomy.blocks[:2], facts=facts)), "resid_post")
    assert_refused(
        surveyed_as(monkeypatch, hf, replace(anatomy, blocks=anatomy.blocks[1:], facts=facts)), "resid_pre", layer=0
    )


# ---- the right module, read in a wrong way


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "falcon"])
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_slice_of_a_fused_projection_that_is_off_by_a_head_is_refused(monkeypatch, family, name):
    hf = families.tiny(family)
    anatomy = survey(hf)
    address = Address(name, LAYER)
    site = anatomy.site(address)
    assert site.view.channels is not None
    head = anatomy.facts.head_dim * (1 if name == "query" else -1)
    moved = replace(site.view.channels, start=site.view.channels.start + head)
    wrong = replace(site, view=replace(site.view, channels=moved))
    assert_refused(surveyed_as(monkeypatch, hf, with_sites(anatomy, {address: wrong})), name)


@pytest.mark.parametrize(
    ("family", "module", "packing"),
    [
        # as if the heads of GPT-NeoX lay side by side, and those of GPT-2 were packed one by one
        (
            "gpt_neox",
            "attention.query_key_value",
            {"query": (0, 48, 48, 1), "key": (48, 48, 48, 1), "value": (96, 48, 48, 1)},
        ),
        ("gpt2", "attn.c_attn", {"query": (0, 12, 36, 4), "key": (12, 12, 36, 4), "value": (24, 12, 36, 4)}),
    ],
)
@pytest.mark.parametrize("names", [("query",), ("key",), ("value",), ("query", "key", "value")], ids=" ".join)
def test_another_familys_packing_of_the_same_projection_is_refused(monkeypatch, family, module, packing, names):
    hf = families.tiny(family)
    anatomy = survey(hf)
    path = f"{anatomy.blocks[LAYER].path}.{module}"
    wrong = {
        Address(name, LAYER): ModuleSite(path, "output", view=View(channels=Channels(*packing[name]))) for name in names
    }
    assert_refused(surveyed_as(monkeypatch, hf, with_sites(anatomy, wrong)), *names)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_scores_before_their_scale_cap_and_mask_are_refused(monkeypatch, family):
    hf = families.tiny(family, "eager")
    anatomy = survey(hf)
    product = anatomy.site(Address("query_rotated", LAYER))
    view = anatomy.site(Address("attn_scores", LAYER)).view
    raw = OpSite(product.path, product.op, product.nth, None, product.call, view)
    wrong = with_sites(anatomy, {Address("attn_scores", LAYER): raw})
    assert_refused(surveyed_as(monkeypatch, hf, wrong), "attn_scores")


@pytest.mark.parametrize("cap", [None, 2.0, 30.0])
def test_a_wrong_soft_cap_of_the_scores_is_refused(monkeypatch, cap):
    hf = families.tiny("gemma2")
    wrong = with_block(survey(hf), constants={} if cap is None else {"score_cap": cap})
    assert_refused(surveyed_as(monkeypatch, hf, wrong), "attn_scores")


@pytest.mark.parametrize("ops", [(), (("div", 30.0), ("tanh", 0.0), ("mul", 30.0))])
def test_wrong_arithmetic_from_the_unembedding_to_the_logits_is_refused(monkeypatch, ops):
    hf = families.tiny("gemma2")
    model = surveyed_as(monkeypatch, hf, replace(survey(hf), logit_ops=ops))
    assert_refused(model, "logits", layer=None)


@pytest.mark.parametrize("name", ["attn_out_post", "mlp_out_post"])
@pytest.mark.parametrize("family", ["llama", "gptj", "gemma2", "granite"])
def test_a_contribution_with_a_multiplier_that_is_not_there_is_refused(monkeypatch, family, name):
    hf = families.tiny(family)
    anatomy = survey(hf)
    site = anatomy.site(Address(name, LAYER))
    wrong = with_sites(anatomy, {Address(name, LAYER): replace(site, view=replace(site.view, scale=0.5))})
    assert_refused(surveyed_as(monkeypatch, hf, wrong), name)


@pytest.mark.parametrize("name", ["attn_out_post", "mlp_out_post"])
@pytest.mark.parametrize("family", ["llama", "gptj", "mixtral"])
def test_a_wrong_multiplier_is_not_served_however_small_the_contribution(monkeypatch, family, name):
    hf = families.fresh(family)
    with torch.no_grad():
        for path, weight in hf.named_parameters():
            if any(out in path for out in ("o_proj", "out_proj", "down_proj", "fc_out")):
                weight.mul_(1e-6)
    anatomy = survey(hf)
    site = anatomy.site(Address(name, LAYER))
    wrong = with_sites(anatomy, {Address(name, LAYER): replace(site, view=replace(site.view, scale=0.9))})
    model = surveyed_as(monkeypatch, hf, wrong)
    assert model.refuses(f"{name}.{LAYER}")


def test_a_forgotten_position_embedding_is_noticed(monkeypatch):
    hf = families.tiny("gpt2")
    anatomy = survey(hf)
    model = surveyed_as(
        monkeypatch, hf, replace(anatomy, entry=replace(anatomy.entry, summands=anatomy.entry.summands[:1]))
    )
    assert_refused(model, "resid_pre", layer=0)


# ---- weights that make an equation true whatever the tensors are

ZEROED = {
    "o_proj": {"attn_out", "attn_out_post"},
    "down_proj": {"mlp_out", "mlp_out_post"},
    "q_proj": {"query_rotated", "key_rotated"},
}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2", "mistral"])
@pytest.mark.parametrize("module", ZEROED)
def test_an_equation_that_holds_trivially_proves_nothing(family, module):
    hf = families.fresh(family)
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if f".{module}." in name:
                weight.zero_()
    model = locant.load_model(hf)
    vacuous = {row.address.name for row in model.points() if row.proof == "vacuous"}
    assert vacuous >= ZEROED[module]
    for name in ZEROED[module]:
        row = model.points()[name, 0]
        assert not row.served
        assert "trivially" in row.reason
        assert "trivially" in model.refuses(row.address)
    assert model.refuses("resid_post.1") is None


def test_a_point_no_identity_speaks_of_is_refused():
    judged = judge("llama")
    anatomy = judged.anatomy
    lonely = replace(anatomy, trunk=replace(anatomy.trunk, sites={"lm_head": anatomy.trunk.sites["lm_head"]}))
    tape = {Address("lm_head"): judged.tape[Address("lm_head")]}
    lonely = replace(lonely, blocks=tuple(replace(b, sites={}) for b in lonely.blocks))
    evidence = Evidence(lonely, tape, families.token_ids(), loaded("llama").hf.get_submodule)
    verdict = prove(evidence)[Address("lm_head")]
    assert verdict.state == "refused"
    assert "nothing proves it" in verdict.reason


def test_a_linear_map_whose_result_is_thrown_away_is_not_the_output_projection():
    hf = copy.deepcopy(families.tiny("llama"))
    attention = hf.model.layers[0].self_attn
    attention.probe = torch.nn.Linear(hf.config.hidden_size, hf.config.hidden_size)
    forward = attention.forward

    def probed(*args, **kwargs):
        result = forward(*args, **kwargs)
        attention.probe(result[0])
        return result

    attention.forward = probed
    model = EagerModel(hf)
    assert model.points()["attn_out.0"].how == "model.layers.0.self_attn.o_proj.output"
    assert model.points()["z.0"].served
