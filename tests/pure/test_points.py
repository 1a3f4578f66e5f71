from types import SimpleNamespace
from typing import get_args

import pytest

import locant
from locant import POINTS, UnknownPoint
from locant.points import REQUIREMENTS, Requirement, reason, vllm_hookable

DOCUMENTED_POINTS = """
embeddings resid_pre attn_in q_norm_in q_norm_out k_norm_in k_norm_out value attn_scores attn_probs z
attn_gate attn_out attn_out_post resid_mid mlp_in mlp_pre mlp_pre_linear mlp_act router_logits
expert_weights expert_indices mlp_out mlp_out_post resid_post final_norm lm_head resid_streams
attn_stream_collapse mlp_stream_collapse attn_stream_write attn_stream_mix mlp_stream_write mlp_stream_mix
""".split()
FURTHER_POINTS = ["query", "key", "query_rotated", "key_rotated", "logits"]
REFUSED_BY_VLLM = {
    "attn_gate": "unimplemented",
    "mlp_pre": "unreachable",
    "mlp_pre_linear": "unreachable",
    "expert_weights": "unreachable",
    "expert_indices": "unreachable",
    "lm_head": "unreachable",
}
AXES = {"layer", "head", "neuron", "position", "dest_pos", "src_pos", "stream", "expert"}
FACTS = SimpleNamespace(
    d_model=64,
    n_heads=8,
    n_kv_heads=2,
    head_dim=16,
    d_mlp=256,
    vocab_size=1000,
    n_experts=None,
    experts_per_token=None,
)


def test_the_points_are_the_documented_34_and_five_more():
    assert len(DOCUMENTED_POINTS) == 34
    assert sorted(POINTS) == sorted([*DOCUMENTED_POINTS, *FURTHER_POINTS])


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        POINTS["mine"] = POINTS["z"]
    with pytest.raises(AttributeError):
        POINTS["z"].width = ()


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_every_row_is_whole(point):
    assert POINTS[point.name] is point
    assert point.meaning.endswith(".")
    assert "." not in point.meaning[:-1]
    assert set(point.axes) <= AXES
    assert point.width
    assert point.proof
    assert point.needs in REQUIREMENTS
    for service in (point.eager, point.vllm):
        assert service.served is (service.reason == "")
        assert service.reason == "" or service.reason.endswith(".")


def test_every_requirement_is_explained_and_used():
    assert set(REQUIREMENTS) == set(get_args(Requirement)) == {point.needs for point in POINTS.values()}


def test_names_can_be_parts_of_an_address():
    assert all(name.replace("_", "").isalnum() and name.isascii() for name in POINTS)
    assert "path" not in POINTS


def test_trunk_points():
    assert [n for n, p in POINTS.items() if p.scope == "trunk"] == [
        "embeddings",
        "final_norm",
        "lm_head",
        "logits",
    ]


def test_stream_points_need_streams_and_coefficients_cannot_be_written():
    streams = {name for name, point in POINTS.items() if point.needs == "streams"}
    assert len(streams) == 7
    read_only = {name for name, point in POINTS.items() if point.read_only}
    assert read_only - {"expert_indices"} == {name for name in streams if name.endswith(("_write", "_mix"))}
    assert {n for n, p in POINTS.items() if p.takes_stream} == {
        "resid_pre",
        "resid_mid",
        "resid_post",
        "resid_streams",
    }


def test_one_point_holds_integers():
    assert [name for name, point in POINTS.items() if point.value == "integer"] == ["expert_indices"]


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("resid_post", "d_model", 64),
        ("query", "n_heads * head_dim", 128),
        ("z", "n_heads * head_dim", 128),
        ("value", "n_kv_heads * head_dim", 32),
        ("key", "n_kv_heads * head_dim", 32),
        ("mlp_act", "d_mlp", 256),
        ("logits", "vocab_size", 1000),
        ("attn_probs", "n_heads * query * key", None),
        ("router_logits", "n_experts", None),
        ("resid_streams", "n_streams", None),
    ],
)
def test_width(name, text, size):
    assert POINTS[name].width_text == text
    assert POINTS[name].width_of(FACTS) == size


def test_a_fact_named_like_a_prompt_axis_changes_nothing():
    assert POINTS["attn_probs"].width_of(SimpleNamespace(n_heads=2, query=3, key=3)) is None


def test_eager_serves_every_point():
    assert all(point.eager.served for point in POINTS.values())


def test_vllm_serves_28_of_the_34_two_of_them_by_recompute():
    assert len(vllm_hookable() & set(DOCUMENTED_POINTS)) == 28
    assert set(POINTS) - vllm_hookable() == set(REFUSED_BY_VLLM)
    assert {n for n, p in POINTS.items() if p.vllm.kind == "recompute"} == {"attn_scores", "attn_probs"}
    assert {n: POINTS[n].vllm.kind for n in REFUSED_BY_VLLM} == REFUSED_BY_VLLM


@pytest.mark.parametrize("name", POINTS)
def test_a_reason_is_given_for_refusals_only(name):
    assert (reason(name) is None) is (name in vllm_hookable())


def test_the_module_is_public():
    assert locant.points.reason("lm_head") == reason("lm_head")


def test_an_unknown_point_gets_the_closest_names():
    with pytest.raises(UnknownPoint) as caught:
        reason("resid_pots")
    assert str(caught.value) == (
        "resid_pots: no such point. There are 39 points; locant.POINTS lists them. "
        "Did you mean resid_post or resid_pre or resid_mid?"
    )
