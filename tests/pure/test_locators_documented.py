"""Every code block of the document that specifies locators, run as it stands there, on GPT-2's sizes.

The document loads the model through another library; here `model` is the facts of the same model.
"""

import contextlib
import io
import re

import pytest
import yaml

from locant import Facts, Filter, Index, LocatorError, ModelAxis, ModelLayerLocation, ModelLocatorConfig

GPT2 = Facts.from_dict(
    {
        "n_layers": 12,
        "n_heads": 12,
        "d_head": 64,
        "d_model": 768,
        "d_mlp": 3072,
        "gated_mlp": False,
        "vocab_size": 50257,
    }
)

BLOCKS = [
    (
        '''
from locant import ModelAxis, ModelLayerLocation, ModelLocatorConfig
from locant.model.index import Index

def rows(locator: ModelLocatorConfig, n_positions: int = 6):
    """The rows a locator resolves to for a prompt of n_positions tokens, as index.csv holds them."""
    return Index(locator, locator.parse(model, n_positions)).to_df()

locator = ModelLocatorConfig(
    activation=ModelLayerLocation.RESIDUAL_POST,
    location=[ModelAxis.LAYER, ModelAxis.POSITION],
)
print(rows(locator))  # 72 rows: 12 layers x 6 positions
''',
        [72],
    ),
    (
        """
from locant import Filter

locator = ModelLocatorConfig(
    activation=ModelLayerLocation.ATTENTION_Z,
    location=[ModelAxis.LAYER, ModelAxis.HEAD, ModelAxis.POSITION],
    filter=Filter.from_config(
        [
            {ModelAxis.LAYER: {"range": [0, 5]}, ModelAxis.POSITION: -1},  # layers 0-5, last position only
            {ModelAxis.LAYER: 11},  # or layer 11, every position
            {"not": {ModelAxis.HEAD: 0}},  # minus every row of head 0
        ]
    ),
)
print(len(rows(locator)))  # 132: (6 layers x 1 position + 1 layer x 6 positions) x 11 heads
""",
        [132],
    ),
    (
        """
locator = ModelLocatorConfig(
    activation=ModelLayerLocation.ATTENTION_PATTERN,
    location=[ModelAxis.LAYER, ModelAxis.HEAD, ModelAxis.DESTINATION_POSITION, ModelAxis.SOURCE_POSITION],
    filter=Filter.from_config([{ModelAxis.LAYER: 9, ModelAxis.HEAD: 8, ModelAxis.DESTINATION_POSITION: -1}]),
)
print(len(rows(locator)))  # 6: dest_pos 5, src_pos 0 to 5
""",
        [6],
    ),
    (
        """
from dataclasses import replace

from locant import Combination, Group, Incremental

heads = ModelLocatorConfig(activation=ModelLayerLocation.ATTENTION_Z, location=[ModelAxis.LAYER, ModelAxis.HEAD])

print(rows(replace(heads, filter=Filter.from_config([{ModelAxis.LAYER: 9}]), group=Group({ModelAxis.HEAD: [6, 9]}))))
# 11 rows: one reading heads 6 and 9 together, and one for each other head of layer 9

print(
    rows(
        replace(
            heads,
            filter=Filter.from_config([{ModelAxis.LAYER: 9, ModelAxis.HEAD: 0}]),
            incremental=Incremental({ModelAxis.HEAD: [6, 9]}),
        )
    )
)
# 3 rows: heads [0], [0, 6] and [0, 6, 9]

print(
    rows(
        replace(
            heads,
            filter=Filter.from_config([{ModelAxis.LAYER: 9, ModelAxis.HEAD: [6, 9, 10]}]),
            group=Group({ModelAxis.HEAD: "all"}),
            combination=Combination(location=[ModelAxis.HEAD], max_elements=2),
        )
    )
)
# 6 rows: [6], [9], [10], [6, 9], [6, 10], [9, 10]
""",
        [11, 3, 6],
    ),
    (
        """
from locant import Coordinates

locator = ModelLocatorConfig(
    coordinates=Coordinates(
        [
            {ModelAxis.ACTIVATION: ModelLayerLocation.RESIDUAL_POST, ModelAxis.LAYER: -2, ModelAxis.POSITION: -1},
            {ModelAxis.ACTIVATION: ModelLayerLocation.MLP_OUT, ModelAxis.LAYER: -1, ModelAxis.POSITION: -1},
        ]
    )
)
print(rows(locator))  # 2 rows, in the order listed: resid.post at layer 10 and mlp.out at layer 11, both at position 5
""",
        [2],
    ),
]

YAML = """
source:
  activation: attn.z
  location: [layer, head, position]
  filter:
    - layer: {range: [0, 5]}
      position: -1
    - layer: 11
    - not: {head: 0}
"""


@pytest.fixture(scope="module")
def ran():
    """What each block printed, and the names that are left."""
    names: dict = {"model": GPT2}
    printed = []
    for code, _ in BLOCKS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, names)
        printed.append(out.getvalue())
    return printed, names


def test_every_block_prints_the_rows_it_says(ran):
    found = [[int(a or b) for a, b in re.findall(r"shape: \((\d+),|^(\d+)$", text, re.MULTILINE)] for text in ran[0]]
    assert found == [said for _, said in BLOCKS]


def test_the_rows_are_those_the_comments_describe(ran):
    printed, names = ran
    rows, heads, replace = names["rows"], names["heads"], names["replace"]
    growing = replace(
        heads, filter=Filter.from_config([{"layer": 9, "head": 0}]), incremental=names["Incremental"]({"head": [6, 9]})
    )
    assert rows(growing)["source_head"].to_list() == [[0], [0, 6], [0, 6, 9]]
    chosen = replace(
        heads,
        filter=Filter.from_config([{"layer": 9, "head": [6, 9, 10]}]),
        group=names["Group"]({"head": "all"}),
        combination=names["Combination"](location=["head"], max_elements=2),
    )
    assert rows(chosen)["source_head"].to_list() == [[6], [9], [10], [6, 9], [6, 10], [9, 10]]
    assert rows(names["locator"]).rows() == [(10, 5, "resid.post"), (11, 5, "mlp.out")]
    assert "[6, 9]" in printed[3]


def test_the_config_file_writes_the_same_locator():
    python = ModelLocatorConfig(
        activation=ModelLayerLocation.ATTENTION_Z,
        location=[ModelAxis.LAYER, ModelAxis.HEAD, ModelAxis.POSITION],
        filter=Filter.from_config(
            [
                {ModelAxis.LAYER: {"range": [0, 5]}, ModelAxis.POSITION: -1},
                {ModelAxis.LAYER: 11},
                {"not": {ModelAxis.HEAD: 0}},
            ]
        ),
    )
    assert ModelLocatorConfig.from_config(yaml.safe_load(YAML)["source"]) == python


@pytest.mark.parametrize(
    "fields",
    [
        {"activation": "embed", "location": ["layer"]},
        {"activation": "attn.pattern", "location": ["layer", "position"]},
        {"activation": "attn.pattern", "location": ["layer", "neuron"]},
        {"activation": "mlp.pre_linear", "location": ["layer"]},
        {"activation": "resid.post", "location": ["layer", "head"]},
        {"activation": "resid.post", "location": ["layer"], "filter": [{"layer": 12}]},
        {"activation": "resid.post", "location": ["position"]},
        {"activation": "attn.z", "coordinates": [{"layer": [0, 1], "head": 0}]},
        {"activation": "embed", "location": ["position"], "coordinates": [{"position": 0}]},
    ],
)
def test_what_the_document_says_is_refused(fields):
    with pytest.raises(LocatorError):
        ModelLocatorConfig.from_config(fields).parse(GPT2, 6)


def test_the_sizes_of_neuron_in_the_table():
    sizes = {"d_model": 768, "d_head": 64, "d_mlp": 3072}
    table = {
        "d_model": ["embed", "resid.pre", "resid.mid", "resid.post", "attn.in", "attn.out_pre_norm", "attn.out"],
        "d_head": ["attn.q", "attn.k", "attn.v", "attn.z"],
        "d_mlp": ["mlp.pre", "mlp.post"],
    }
    table["d_model"] += ["mlp.in", "mlp.out_pre_norm", "mlp.out"]
    for size, activations in table.items():
        for activation in activations:
            layer = {} if activation == "embed" else {"layer": 0}
            last = {"activation": activation, "coordinates": [{**layer, "neuron": -1}]}
            locator = ModelLocatorConfig.from_config(last)
            assert Index(locator, locator.parse(GPT2, 6))[0]["source_neuron"] == sizes[size] - 1


def test_lists_on_several_axes_are_one_row():
    fields = {"layer": 0, "head": 0, "dest_pos": [4, 5], "src_pos": [1, 4]}
    locator = ModelLocatorConfig.from_config({"activation": "attn.pattern", "coordinates": [fields]})
    assert len(Index(locator, locator.parse(GPT2, 6))) == 1


def test_a_range_of_symbolic_positions_stays_on_one_side():
    def last(span: list[int]) -> ModelLocatorConfig:
        filters = Filter.from_config([{"position": {"range": span}}])
        return ModelLocatorConfig("resid.post", ["layer", "position"], filters)

    assert Index(last([-3, -1]), last([-3, -1]).parse(GPT2, [4, 6]))[0]["source_position"] == -3
    with pytest.raises(LocatorError, match="one side"):
        last([1, -1]).parse(GPT2, [4, 6])
    with pytest.raises(LocatorError, match="shortest prompt has 2 tokens"):
        last([-3, -1]).parse(GPT2, [2, 6])
