import pytest

from locant import POINTS, UnknownPoint
from locant.names import LOCATOR_NAMES, locator_name, point_of


def test_the_eighteen_dotted_names_are_points():
    assert len(LOCATOR_NAMES) == len(set(LOCATOR_NAMES.values())) == 18
    assert set(LOCATOR_NAMES.values()) <= set(POINTS)
    assert not set(LOCATOR_NAMES) & set(POINTS)


@pytest.mark.parametrize("dotted", LOCATOR_NAMES)
def test_dotted_names_translate_both_ways(dotted):
    assert locator_name(point_of(dotted)) == dotted


@pytest.mark.parametrize("point", POINTS)
def test_every_point_can_be_located_by_its_own_name(point):
    assert point_of(point) == point
    assert point_of(locator_name(point)) == point


@pytest.mark.parametrize(
    ("dotted", "point"),
    [
        ("attn.out", "attn_out_post"),
        ("attn.out_pre_norm", "attn_out"),
        ("mlp.post", "mlp_act"),
        ("attn.q", "query"),
    ],
)
def test_the_names_that_mislead(dotted, point):
    assert point_of(dotted) == point


@pytest.mark.parametrize("function", [point_of, locator_name])
def test_an_unknown_name_gets_the_closest_ones(function):
    with pytest.raises(UnknownPoint) as caught:
        function("resid.pots")
    assert caught.value.asked == "resid.pots: no such activation"
    assert caught.value.has == "A locator takes the 39 points and 18 dotted names like resid.post"
    assert "resid.post" in caught.value.instead


def test_the_results_spelling_is_asked_for_a_point_only():
    assert locator_name("attn_scores") == "attn_scores"
