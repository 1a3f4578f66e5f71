"""Locators: the handed cases, what is refused and what it says, the spellings, and what else points have for axes."""

import csv
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import polars as pl
import pytest

from locant import (
    POINTS,
    Address,
    Combination,
    Coordinates,
    Facts,
    Filter,
    Group,
    Incremental,
    Index,
    LocatorError,
    ModelAxis,
    ModelLayerLocation,
    ModelLocatorConfig,
)
from locant.names import LOCATOR_NAMES

HANDED = json.loads((Path(__file__).parent / "locator_cases.json").read_text(encoding="utf-8"))
FACTS = {name: Facts.from_dict(sizes) for name, sizes in HANDED["facts"].items()}
GPT2, LLAMA = FACTS["gpt2"], FACTS["llama"]
ATTENTION = {"mixer": "attention", "head_dim": 2}


def index(locator, facts=GPT2, n_positions=6) -> Index:
    made = locator if isinstance(locator, ModelLocatorConfig) else ModelLocatorConfig.from_config(locator)
    return Index(made, made.parse(facts, n_positions))


def cells(locator, facts=GPT2, n_positions=6) -> list[list[object]]:
    """The rows without the activation."""
    return [list(row.values())[:-1] for row in index(locator, facts, n_positions)]


def refusal(locator, facts=GPT2, n_positions=6) -> LocatorError:
    with pytest.raises(LocatorError) as caught:
        index(locator, facts, n_positions)
    return caught.value


def named(case):
    return pytest.param(case, id=case["name"])


@pytest.mark.parametrize("case", [named(case) for case in HANDED["cases"] if "rows" in case])
def test_a_handed_locator_gives_its_rows(case):
    # Two of its terms contradict each other, which here has to be said.
    allowed = {"allow_empty": True} if not case["rows"] else {}
    made = index(case["locator"] | allowed, FACTS[case["model"]], case["n_positions"])
    assert list(made.columns) == case["columns"]
    assert [list(row.values()) for row in made] == case["rows"]
    assert made.to_df().columns == case["columns"]
    assert made.to_df().height == len(case["rows"])
    if not case["rows"]:
        assert "layer" in refusal(case["locator"]).asked


@pytest.mark.parametrize("case", [named(case) for case in HANDED["cases"] if case.get("refused")])
def test_a_handed_locator_is_refused(case):
    assert refusal(case["locator"], FACTS[case["model"]], case["n_positions"]).asked


def test_every_handed_case_is_tested():
    assert len(HANDED["cases"]) == 129
    assert all(("rows" in case) != bool(case.get("refused")) for case in HANDED["cases"])


# ---- refusals: what was asked, what is allowed

Z = {"activation": "attn.z", "location": ["layer", "head"]}
RESID = {"activation": "resid.post", "location": ["layer", "position"]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (RESID | {"filter": [{"layer": {"range": [0, 1, 2]}}]}, ["filter, term 1, layer", "[0, 1, 2]", "[start, end]"]),
        (RESID | {"filter": [{"layer": {"range": ["0", 1]}}]}, ["filter, term 1, layer", "'0'", "an int"]),
        (RESID | {"filter": [{"layer": 0}, {"position": {"range": [3, 1]}}]}, ["term 2, position", "[3, 1]", "start"]),
        (RESID | {"filter": [{"layer": True}]}, ["filter, term 1, layer", "True", "bool", "an int"]),
        (RESID | {"filter": [{"layer": []}]}, ["filter, term 1, layer", "empty"]),
        (RESID | {"filter": [{"layer": [1, [2]]}]}, ["filter, term 1, layer", "[2]", "ints and ranges"]),
        (RESID | {"filter": [{"layer": [1, 1]}]}, ["filter, term 1, layer", "1", "twice"]),
        (RESID | {"filter": [{"layer": {"span": [0, 1]}}]}, ["filter, term 1, layer", "span", "{range: [start, end]}"]),
        (RESID | {"filter": [{"layer": 0, "not": {"layer": 1}}]}, ["filter, term 1", "only key"]),
        (RESID | {"filter": [{"not": {}}]}, ["filter, term 1", "empty"]),
        (RESID | {"filter": [3]}, ["filter, term 1", "3", "mapping"]),
        (RESID | {"filter": {"layer": 0}}, ["filter", "{'layer': 0}", "list"]),
        (RESID | {"filter": [{"depth": 0}]}, ["filter, term 1", "'depth'", "layer, head, neuron"]),
        (RESID | {"location": ["layer", "layer"]}, ["location", "layer", "twice"]),
        (RESID | {"location": "layer"}, ["location", "'layer'", "['layer']"]),
        (RESID | {"location": ["layer", "dest_pos"]}, ["resid.post", "dest_pos", "layer, stream, position, neuron"]),
        (RESID | {"activation": None}, ["activation", "resid.post"]),
        (RESID | {"activation": 5}, ["activation 5", "int", "resid.post"]),
        (RESID | {"activation": "resid.pots"}, ["resid.pots", "Did you mean resid.post"]),
        (RESID | {"activation": "model.layers.5.mlp"}, ["model.layers.5.mlp", "a point"]),
        (RESID | {"activation": "resid_post.5.head-3"}, ["resid_post.5.head-3", "stream-S"]),
        (RESID | {"activations": "resid.post"}, ["activations", "activation, location", "Did you mean activation"]),
        (RESID | {"allow_empty": 1}, ["allow_empty", "1", "true, false"]),
        (RESID | {"coordinates": [{"layer": 0}]}, ["coordinates", "location"]),
        (Z | {"group": {"head": "every"}}, ["group, head", "'every'", "all"]),
        (Z | {"group": {"head": []}}, ["group, head", "empty"]),
        (Z | {"group": {"head": [1, 1]}}, ["group, head", "1", "twice"]),
        (Z | {"group": ["head"]}, ["group", "['head']", "mapping"]),
        (Z | {"group": {"layer": [0, 1]}}, ["group", "layer", "a row reads one"]),
        (Z | {"group": {"position": [0, 1]}}, ["group", "position", "layer, head"]),
        (Z | {"incremental": {"head": [True]}}, ["incremental, head", "True", "bool"]),
        (Z | {"incremental": {"src_pos": [1]}}, ["attn.z", "src_pos", "layer, position, head, neuron"]),
        (Z | {"combination": {"location": ["position"]}}, ["combination", "position", "layer, head"]),
        (Z | {"combination": {"location": ["head"], "max_elements": 0}}, ["max_elements", "0", "at least one"]),
        (Z | {"combination": {"location": ["head"], "max_elements": True}}, ["max_elements", "True", "bool"]),
        (Z | {"combination": {"axes": ["head"]}}, ["axes", "location, max_elements"]),
        ({"activation": "attn.z"}, ["attn.z", "layer", "z.5"]),
        ({"activation": "attn.z", "coordinates": [{"head": 1}]}, ["coordinate 1", "layer"]),
        ({"activation": "attn.z", "coordinates": [{"layer": 0}, {"head": 1}]}, ["coordinate 2", "head", "layer"]),
        ({"activation": "attn.z", "coordinates": [{"layer": 0, "head": [1, 1]}]}, ["coordinate 1, head", "twice"]),
        ({"activation": "attn.z", "coordinates": [{"layer": [0], "head": 1}]}, ["coordinate 1, layer", "reads one"]),
        ({"activation": "attn.z", "coordinates": [{}]}, ["coordinate 1", "empty"]),
        ({"activation": "attn.z", "coordinates": [5]}, ["coordinate 1", "5", "mapping"]),
        ({"coordinates": [{"layer": 0}]}, ["activation", "coordinates"]),
    ],
)
def test_what_is_wrong_by_itself_is_refused_when_it_is_read(fields, said):
    with pytest.raises(LocatorError) as caught:
        ModelLocatorConfig.from_config(fields)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (RESID | {"filter": [{"layer": 3}]}, ["filter, term 1", "layer 3", "0 to 2"]),
        (RESID | {"filter": [{"not": {"position": -7}}]}, ["filter, term 1", "position -7", "0 to 5"]),
        (RESID | {"filter": [{"position": {"range": [4, -4]}}]}, ["filter, term 1", "[4, -4]", "nothing"]),
        (Z | {"group": {"head": [0, 4]}}, ["group, head", "head 4", "0 to 3"]),
        (Z | {"incremental": {"head": [-5]}}, ["incremental, head", "head -5", "0 to 3"]),
        ({"activation": "attn.z", "coordinates": [{"layer": 0, "head": 4}]}, ["coordinate 1", "head 4", "0 to 3"]),
        ({"activation": "attn.z", "coordinates": [{"layer": -4}]}, ["coordinate 1", "layer -4", "0 to 2"]),
        ({"activation": "resid_post.3", "location": ["position"]}, ["resid_post.3", "layer 3", "0 to 2"]),
        ({"activation": "mlp.pre_linear", "location": ["layer"]}, ["mlp.pre_linear in layer 0", "mlp_pre"]),
        ({"activation": "router_logits", "location": ["layer"]}, ["router_logits in layer 0", "experts"]),
        ({"activation": "resid_streams", "location": ["layer"]}, ["resid_streams in layer 0", "streams"]),
        ({"activation": "resid_post.0.stream-1"}, ["stream 1"]),
        ({"activation": "lm_head", "location": ["neuron"]}, ["neuron of lm_head", "vocab_size"]),
    ],
)
def test_what_the_model_lacks_is_refused_when_the_index_is_resolved(fields, said):
    made = ModelLocatorConfig.from_config(fields)
    with pytest.raises(LocatorError) as caught:
        made.parse(GPT2, 6)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("n_positions", [0, -1, True, 1.0, "6", [], [3, 0]])
def test_a_number_of_positions_that_is_none_is_refused(n_positions):
    with pytest.raises(LocatorError, match="n_positions"):
        ModelLocatorConfig("embed").parse(GPT2, n_positions)


def test_what_is_no_model_is_refused():
    with pytest.raises(LocatorError, match=r"Facts.from_dict"):
        ModelLocatorConfig("embed").parse({"n_layers": 3}, 6)  # pyright: ignore[reportArgumentType]


def test_an_index_takes_the_rows_of_its_own_locator():
    one, other = ModelLocatorConfig("embed"), ModelLocatorConfig("embed", ["position"])
    with pytest.raises(LocatorError):
        Index(one, other.parse(GPT2, 6))
    with pytest.raises(LocatorError, match="sink"):
        Index(one, one.parse(GPT2, 6), side="sink")  # pyright: ignore[reportArgumentType]


def test_an_index_too_large_to_hold_is_refused():
    wide = Facts.from_dict({"n_layers": 100, "d_model": 100_000})
    located = {"activation": "resid.post", "location": ["layer", "neuron", "position"]}
    assert "the most" in str(refusal(located, wide, 100))
    every = {"activation": "resid_post.0", "location": ["neuron"], "group": {"neuron": "all"}}
    assert "max_elements" in str(refusal(every | {"combination": {"location": ["neuron"]}}, wide))
    # The grid of a narrow filter is never made, however large the axes are.
    narrow = located | {"filter": [{"layer": -1, "neuron": -1, "position": -1}]}
    assert cells(narrow, wide, 10**6) == [[99, 99_999, 999_999]]


# ---- spellings, and the same locator written differently


def test_the_members_are_the_dotted_names():
    assert [member.value for member in ModelLayerLocation] == list(LOCATOR_NAMES)
    assert ModelAxis("dest_pos") is ModelAxis.DESTINATION_POSITION
    assert ModelAxis("src_pos") is ModelAxis.SOURCE_POSITION


@pytest.mark.parametrize(("dotted", "point"), LOCATOR_NAMES.items())
def test_either_spelling_of_an_activation_is_the_same_locator(dotted, point):
    layer = ["layer"] if POINTS[point].scope == "block" else []
    locators = [ModelLocatorConfig(name, layer) for name in (dotted, point, ModelLayerLocation(dotted))]
    assert locators[0] == locators[1] == locators[2]
    gated = Facts.from_dict(HANDED["facts"]["llama"])
    assert index(locators[1], gated)[0]["source_activation"] == dotted


@pytest.mark.parametrize("point", POINTS)
def test_every_point_is_located_with_the_axes_it_has(point):
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 3, "d_mlp": 5, "n_experts": 6, "experts_per_token": 2}
    streams = {"n_streams": 8 if POINTS[point].needs == "streams" else 1}
    facts = Facts.from_dict({"n_layers": 1, "d_model": 7, "vocab_size": 11} | streams | sizes)
    expected = {"position": 9, "dest_pos": 9, "src_pos": 9, "stream": 8}
    expected["head"] = 2 if "n_kv_heads" in POINTS[point].width else 4
    expected["expert"] = 6 if point == "router_logits" else 2
    last = {"d_model": 7, "d_mlp": 5, "vocab_size": 11, "head_dim": 3, "n_streams": 7}
    expected["neuron"] = last.get(POINTS[point].width[-1], 0)
    layer = ["layer"] if POINTS[point].scope == "block" else []
    for axis in {axis for axis in POINTS[point].axes if POINTS[point].axes.count(axis) == 1}:
        assert len(index(ModelLocatorConfig(point, [*layer, axis]), facts, 9)) == expected[axis]
    if POINTS[point].axes.count("stream") == 2:
        assert "read it whole" in str(refusal({"activation": point, "location": ["layer", "stream"]}, facts))


def test_streams_are_an_axis_of_the_stack_and_pick_a_tensor_of_a_residual():
    facts = Facts.from_dict({"n_layers": 2, "d_model": 4, "n_streams": 3})
    stack = index(
        ModelLocatorConfig("resid_streams", ["layer", "stream"], group=Group({ModelAxis.STREAM: [0, 2]})), facts
    )
    assert [row["source_stream"] for row in stack] == [[0, 2], 1] * 2
    assert stack.addresses == [Address("resid_streams", 0), Address("resid_streams", 1)]
    residual = index(ModelLocatorConfig("resid.post", ["layer", "stream"]), facts)
    assert residual.addresses == [Address("resid_post", layer, stream) for layer in range(2) for stream in range(3)]
    assert "a row reads one" in str(
        refusal({"activation": "resid.post", "location": ["layer", "stream"], "group": {"stream": "all"}}, facts)
    )
    assert "streams" in str(refusal({"activation": "resid.post", "location": ["layer", "stream"]}))
    assert "3 streams" in str(refusal({"activation": "resid.post", "location": ["layer"]}, facts))
    assert index(ModelLocatorConfig("resid_streams.1.stream-2"), facts).addresses == [Address("resid_streams", 1)]


def test_an_address_says_point_and_layer():
    by_address = index(ModelLocatorConfig("resid_post.1", ["position"]))
    by_axes = index(ModelLocatorConfig("resid.post", ["layer", "position"], Filter.from_config([{"layer": 1}])))
    assert by_address.columns == by_axes.columns
    assert list(by_address) == list(by_axes)
    assert list(index(ModelLocatorConfig(Address("resid_post", 1), ["position"]))) == list(by_axes)
    assert "says the layer already" in str(refusal({"activation": "resid_post.1", "location": ["layer"]}))
    streamed = Facts.from_dict({"n_layers": 3, "d_model": 4, "n_streams": 3})
    assert cells({"activation": "resid_post.1.stream-2"}, streamed) == [[1, 2]]
    rows = [{"activation": "resid_post.2", "position": -1}, {"activation": "mlp.out", "layer": -1, "position": 0}]
    assert list(index({"coordinates": rows})) == [
        {"source_layer": 2, "source_position": 5, "source_activation": "resid.post"},
        {"source_layer": 2, "source_position": 0, "source_activation": "mlp.out"},
    ]


def test_python_and_config_files_write_the_same_locator():
    python = ModelLocatorConfig(
        activation=ModelLayerLocation.ATTENTION_Z,
        location=[ModelAxis.LAYER, ModelAxis.HEAD],
        filter=Filter.from_config([{ModelAxis.LAYER: {"range": [0, 1]}}, {"not": {ModelAxis.HEAD: 0}}]),
        group=Group({ModelAxis.HEAD: "all"}),
        incremental=Incremental({ModelAxis.POSITION: [-1, 0]}),
        combination=Combination([ModelAxis.HEAD], max_elements=2),
    )
    config = {
        "activation": "attn.z",
        "location": ["layer", "head"],
        "filter": [{"layer": {"range": [0, 1]}}, {"not": {"head": 0}}],
        "group": {"head": "all"},
        "incremental": {"position": [-1, 0]},
        "combination": {"location": ["head"], "max_elements": 2},
    }
    assert ModelLocatorConfig.from_config(config) == python
    assert python.to_config() == config
    assert replace(python, group=Group()) != python
    explicit = ModelLocatorConfig("embed", coordinates=Coordinates([{ModelAxis.POSITION: [0, -1]}]))
    assert explicit.to_config() == {"activation": "embed", "coordinates": [{"position": [0, -1]}]}
    assert pickle.loads(pickle.dumps(python)) == python
    with pytest.raises(FrozenInstanceError):
        python.location = ()  # pyright: ignore[reportAttributeAccessIssue]


# ---- layers that differ

MIXED = Facts.from_dict(
    {
        "d_model": 8,
        "layers": [
            {**ATTENTION, "n_heads": 4, "n_kv_heads": 1, "channel": "gated", "d_mlp": 6},
            {"mixer": "other", "channel": "moe", "n_experts": 3, "experts_per_token": 2},
            {**ATTENTION, "n_heads": 2, "n_kv_heads": 2, "channel": "plain", "d_mlp": 4, "parallel": True},
        ],
    }
)
ATTENDING = [{"layer": 0}, {"layer": 2}]


def test_each_layer_has_its_own_number_of_heads():
    located = {"location": ["layer", "head"], "filter": ATTENDING}
    assert cells(located | {"activation": "attn.q"}, MIXED) == [[0, 0], [0, 1], [0, 2], [0, 3], [2, 0], [2, 1]]
    assert cells(located | {"activation": "attn.k"}, MIXED) == [[0, 0], [2, 0], [2, 1]]
    turned = {"activation": "attn.q", "location": ["head", "layer"], "filter": ATTENDING}
    assert cells(turned, MIXED) == [[0, 0], [0, 2], [1, 0], [1, 2], [2, 0], [3, 0]]


def test_a_negative_head_counts_from_the_end_of_its_layer():
    last = [{"layer": 0, "head": -1}, {"layer": 2, "head": [-1, -2]}]
    assert cells({"activation": "attn.q", "location": ["layer", "head"], "filter": last}, MIXED) == [
        [0, 3],
        [2, 0],
        [2, 1],
    ]
    grouped = {"activation": "attn.q", "location": ["layer", "head"], "filter": ATTENDING, "group": {"head": [-1, 0]}}
    assert cells(grouped, MIXED) == [[0, [3, 0]], [0, 1], [0, 2], [2, [1, 0]]]
    growing = {"activation": "attn.q", "location": ["layer"], "filter": ATTENDING, "incremental": {"head": [-1, 0]}}
    assert cells(growing, MIXED) == [[0, [3]], [0, [3, 0]], [2, [1]], [2, [1, 0]]]
    dropped = {"activation": "attn.q", "location": ["layer", "head"], "filter": [*ATTENDING, {"not": {"head": -1}}]}
    assert cells(dropped, MIXED) == [[0, 0], [0, 1], [0, 2], [2, 0]]
    listed = [{"layer": 0, "head": -1}, {"layer": -1, "head": -1}]
    assert cells({"activation": "attn.k", "coordinates": listed}, MIXED) == [[0, 0], [2, 1]]


def test_a_head_that_only_some_layers_have_is_refused_without_a_layer():
    error = refusal({"activation": "attn.q", "location": ["layer", "head"], "filter": [{"head": 3}]}, MIXED)
    assert "head 3" in error.asked
    assert cells({"activation": "attn.q", "location": ["layer", "head"], "filter": [{"layer": 0, "head": 3}]}, MIXED)


@pytest.mark.parametrize(
    ("activation", "layers"),
    [
        ("attn.z", [0, 2]),
        ("resid.mid", [0, 1]),
        ("mlp.pre", [0, 2]),
        ("mlp.pre_linear", [0]),
        ("router_logits", [1]),
        ("resid.post", [0, 1, 2]),
    ],
)
def test_a_layer_without_the_activation_is_refused_and_the_others_are_named(activation, layers):
    for layer in range(3):
        located = {"activation": activation, "location": ["layer"], "filter": [{"layer": layer}]}
        if layer in layers:
            assert cells(located, MIXED) == [[layer]]
        else:
            assert f"filter on layer: {layers}" in str(refusal(located, MIXED))
    kept = [{"layer": layer} for layer in layers]
    assert cells({"activation": activation, "location": ["layer"], "filter": kept}, MIXED) == [[n] for n in layers]


# ---- filters that leave nothing, and prompts of different lengths


def test_the_axis_that_a_filter_emptied_is_named():
    nothing = RESID | {"filter": [{"layer": 0}, {"not": {"layer": {"range": [0, 1]}}}]}
    error = refusal(nothing)
    assert "layer" in error.asked
    assert "position" not in error.asked
    assert "allow_empty" in str(error)
    allowed = index(nothing | {"allow_empty": True})
    assert (len(allowed), allowed.addresses, list(allowed)) == (0, [], [])
    assert allowed.to_df().schema == {
        "source_layer": pl.Int64,
        "source_position": pl.Int64,
        "source_activation": pl.String,
    }
    transformed = {"group": {"position": "all"}, "combination": {"location": ["position"]}}
    assert cells(nothing | transformed | {"allow_empty": True, "incremental": {"position": [1]}}) == []


def test_positions_stay_symbolic_for_prompts_of_different_lengths():
    last = RESID | {"filter": [{"layer": 0, "position": [0, -1, 2]}]}
    assert cells(last, n_positions=None) == cells(last, n_positions=[3, 7]) == [[0, -1], [0, 0], [0, 2]]
    # Prompts of one length leave nothing open.
    assert cells(last, n_positions=[4, 4]) == cells(last, n_positions=4) == [[0, 0], [0, 2], [0, 3]]


@pytest.mark.parametrize(
    "fields",
    [
        RESID | {"filter": [{"layer": 0, "position": [0, 3]}]},
        RESID | {"filter": [{"position": {"range": [-4, -1]}}]},
        RESID | {"filter": [{"position": 0}, {"not": {"position": -4}}]},
        RESID | {"filter": [{"position": 0}], "group": {"position": [0, 3]}},
        {"activation": "embed", "incremental": {"position": [1, -4]}},
        {"activation": "embed", "coordinates": [{"position": 0}, {"position": 3}]},
        {"activation": "embed", "coordinates": [{"position": [0, 3]}]},
    ],
)
def test_every_position_exists_in_the_shortest_prompt(fields):
    assert "the shortest prompt has 3 tokens" in str(refusal(fields, n_positions=[8, 3]))
    assert index(fields, n_positions=[8, 4])
    assert index(fields, n_positions=None)


@pytest.mark.parametrize("filters", [[], [{"layer": 0}], [{"not": {"position": -1}}], [{"position": 0}, {"layer": 1}]])
def test_a_term_that_leaves_positions_open_is_refused_for_different_lengths(filters):
    assert "explicit positions" in str(refusal(RESID | {"filter": filters}, n_positions=None))


# ---- the index as a table


def test_columns_are_integers_unless_a_row_holds_a_list():
    frame = index(Z | {"filter": [{"layer": 1}], "group": {"head": [1, 3]}}).to_df()
    assert frame.schema == {"source_layer": pl.Int64, "source_head": pl.List(pl.Int64), "source_activation": pl.String}
    assert frame["source_head"].to_list() == [[0], [1, 3], [2]]
    assert index(Z).to_df().schema["source_head"] == pl.Int64
    grouped = index(Z | {"group": {"head": [1, 3]}, "filter": [{"not": {"head": [1, 3]}}]})
    assert grouped.to_df().schema["source_head"] == pl.Int64
    explicit = {"activation": "attn.z", "coordinates": [{"layer": 0, "head": [0, 1]}, {"layer": 1, "head": 2}]}
    assert index(explicit).to_df()["source_head"].to_list() == [[0, 1], [2]]


def test_the_target_side_has_its_own_columns():
    locator = ModelLocatorConfig("attn.z", ["head", "layer"])
    target = Index(locator, locator.parse(GPT2, 6), side="target")
    assert list(target.columns) == ["target_head", "target_layer", "target_activation"]


def test_an_index_is_a_sequence_of_rows():
    rows = index(Z)
    assert rows[-1] == {"source_layer": 2, "source_head": 3, "source_activation": "attn.z"}
    assert rows[:2] == list(rows)[:2]
    assert rows[1] in rows
    with pytest.raises(IndexError):
        rows[12]
    assert rows.addresses == [Address("z", layer) for layer in range(3)]
    assert "12 rows" in repr(rows)


def test_a_csv_file_has_lists_as_text(tmp_path):
    rows = index(Z | {"filter": [{"layer": 1}], "group": {"head": [1, 3]}})
    with rows.write_csv(tmp_path / "index.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["source_layer", "source_head", "source_activation"],
            ["1", "0", "attn.z"],
            ["1", "[1, 3]", "attn.z"],
            ["1", "2", "attn.z"],
        ]


# ---- facts from plain numbers


def test_facts_are_read_in_either_spelling():
    sizes = {"n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 8}
    assert Facts.from_dict({"n_layers": 2, "n_heads": 6, "n_key_value_heads": 2, "d_head": 8}) == Facts.from_dict(sizes)
    assert Facts.from_dict({"n_layers": 2, "n_heads": 6}).n_kv_heads == 6
    assert Facts.from_dict({"n_layers": 2, "gated_mlp": False}).layers[1].channel == "plain"
    assert (MIXED.n_layers, MIXED.n_heads, MIXED.at(2).n_heads) == (3, None, 2)
    with pytest.raises(TypeError):
        Facts.from_dict({"n_layers": 2, "n_haeds": 6})
