"""Any locator against one that is resolved here by hand: every combination is listed, then filtered one by one."""

import itertools
import json
from dataclasses import dataclass

import polars as pl
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from locant import Facts, Index, LocatorError, ModelLocatorConfig

SYMBOLIC = ("position", "dest_pos", "src_pos")
AXES = {
    "embed": ("position", "neuron"),
    "resid.post": ("layer", "position", "neuron"),
    "attn.z": ("layer", "position", "head", "neuron"),
    "attn.k": ("layer", "position", "head", "neuron"),
    "attn.pattern": ("layer", "head", "dest_pos", "src_pos"),
    "mlp.post": ("layer", "position", "neuron"),
    "router_logits": ("layer", "position", "expert"),
}


@dataclass(frozen=True)
class Model:
    """A model's sizes, layer by layer, and how many tokens its prompt has; no number for several prompts."""

    layers: list[dict[str, int]]
    d_model: int
    n_positions: int | None

    def facts(self, locator: dict) -> Facts:
        channel = "moe" if locator["activation"] == "router_logits" else "gated"
        layers = [{"channel": channel, **layer} for layer in self.layers]
        return Facts.from_dict({"d_model": self.d_model, "layers": layers})

    def size(self, activation: str, axis: str, layer: int) -> int | None:
        if axis in SYMBOLIC:
            return self.n_positions
        own = self.layers[layer]
        if axis == "layer":
            return len(self.layers)
        if axis == "head":
            return own["n_kv_heads" if activation == "attn.k" else "n_heads"]
        if axis == "expert":
            return own["n_experts"]
        return {"attn.z": own["head_dim"], "attn.k": own["head_dim"], "mlp.post": own["d_mlp"]}.get(
            activation, self.d_model
        )

    def sizes(self, activation: str, axis: str) -> list[int]:
        found = [self.size(activation, axis, layer) for layer in range(len(self.layers))]
        return [size for size in found if size is not None]


# ---- the reference


def listed(constraint, size: int | None) -> list[int]:
    """The values of a constraint in the order it lists them."""
    found = []
    for item in constraint if isinstance(constraint, list) else [constraint]:
        ends = item["range"] if isinstance(item, dict) else [item, item]
        start, end = (end + size if end < 0 and size is not None else end for end in ends)
        found += [value for value in range(start, end + 1) if value not in found]
    return found


def kept(rows: list[dict], terms: list[dict], size) -> list[dict]:
    def matches(row: dict, term: dict) -> bool:
        return all(row[axis] in listed(allowed, size(axis, row)) for axis, allowed in term.items())

    keeping = [term for term in terms if "not" not in term]
    dropping = [term["not"] for term in terms if "not" in term]
    return [
        row
        for row in rows
        if (not keeping or any(matches(row, term) for term in keeping)) and not any(matches(row, t) for t in dropping)
    ]


def grouped(rows: list[dict], axis: str, values, size) -> list[dict]:
    rest, found = list(rows), []
    while rest:
        row = rest[0]
        together = [r[axis] for r in rows] if values == "all" else listed(values, size(axis, row))
        if row[axis] not in together:
            found.append(rest.pop(0))
            continue
        others = {a: v for a, v in row.items() if a != axis}
        alike = [r for r in rest if {a: v for a, v in r.items() if a != axis} == others and r[axis] in together]
        merged = sorted((r[axis] for r in alike), key=None if values == "all" else together.index)
        found.append(row | {axis: merged})
        rest = [r for r in rest if r not in alike]
    return found


def grown(rows: list[dict], axis: str, values: list[int], size) -> list[dict]:
    found = []
    for row in rows:
        held = row.get(axis, [])
        held = held if isinstance(held, list) else [held]
        if held:
            found.append(row | {axis: held})
        for value in listed(values, size(axis, row)):
            if value not in held:
                held = [*held, value]
                found.append(row | {axis: held})
    return found


def combined(rows: list[dict], axis: str, most: int | None) -> list[dict]:
    found = []
    for row in rows:
        held = row[axis] if isinstance(row[axis], list) else [row[axis]]
        for count in range(1, (most or len(held)) + 1):
            found += [row | {axis: list(chosen)} for chosen in itertools.combinations(held, count)]
    return found


def enumerated(locator: dict, model: Model) -> list[dict]:
    activation, axes, terms = locator["activation"], locator["location"], locator.get("filter", [])

    def size(axis: str, row: dict) -> int | None:
        return model.size(activation, axis, row.get("layer", 0))

    def universe(axis: str) -> list[int]:
        if axis in SYMBOLIC and model.n_positions is None:
            said = [listed(term[axis], None) for term in terms if "not" not in term]
            return sorted({value for values in said for value in values})
        return list(range(max(model.sizes(activation, axis))))

    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*map(universe, axes))]
    rows = [r for r in rows if all(v < 0 or (n := size(a, r)) is None or v < n for a, v in r.items())]
    rows = kept(rows, terms, size)
    for axis, values in locator.get("group", {}).items():
        rows = grouped(rows, axis, values, size)
    for axis, values in locator.get("incremental", {}).items():
        rows = grown(rows, axis, values, size)
    for axis in locator.get("combination", {}).get("location", []):
        rows = combined(rows, axis, locator["combination"].get("max_elements"))
    return rows


# ---- any locator over any facts


@st.composite
def models(draw: st.DrawFn, several_prompts: bool = True) -> Model:
    few = st.integers(1, 3)
    names = ("n_heads", "n_kv_heads", "head_dim", "d_mlp", "n_experts", "experts_per_token")
    alike = draw(st.booleans())
    first = {name: draw(few) for name in names}
    layers = [first if alike else {name: draw(few) for name in names} for _ in range(draw(few))]
    return Model(layers, draw(few), draw(st.none() | st.integers(1, 4) if several_prompts else st.integers(1, 4)))


@st.composite
def locators(draw: st.DrawFn, model: Model) -> dict:
    """A locator whose every value exists in every layer, with all its parts or few of them."""
    activation = draw(st.sampled_from(sorted(AXES)))
    needed = [axis for axis in AXES[activation] if axis == "layer"]
    optional = [axis for axis in AXES[activation] if axis != "layer"]
    chosen = draw(st.lists(st.sampled_from(optional), unique=True, min_size=not needed))
    axes = draw(st.permutations([*needed, *chosen]))
    several = model.n_positions is None
    smallest = {axis: min(model.sizes(activation, axis), default=3) for axis in AXES[activation]}

    def value(axis: str) -> st.SearchStrategy[int]:
        return st.integers(-smallest[axis], smallest[axis] - 1)

    def span(axis: str) -> st.SearchStrategy[dict]:
        ends = st.lists(value(axis), min_size=2, max_size=2).map(sorted).filter(lambda e: (e[0] < 0) == (e[1] < 0))
        if several and axis in SYMBOLIC:
            return ends.map(lambda e: {"range": e})
        # From a start to a value counted from the end: in every layer the one is before the other.
        mixed = st.tuples(value(axis), value(axis)).filter(lambda e: e[0] >= 0 > e[1] and e[0] <= e[1] + smallest[axis])
        return (ends | mixed.map(list)).map(lambda e: {"range": e})

    def allowed(axis: str):
        one = value(axis) | span(axis)
        return one | st.lists(one, min_size=1, max_size=3, unique_by=repr)

    def body(named: list[str]) -> st.SearchStrategy[dict]:
        return st.fixed_dictionaries({axis: allowed(axis) for axis in named})

    open_axes = [axis for axis in axes if several and axis in SYMBOLIC]
    named = st.lists(st.sampled_from(axes), unique=True, min_size=1)
    terms = [draw(body(list(dict.fromkeys([*open_axes, *draw(named)])))) for _ in range(draw(st.integers(0, 2)))]
    if open_axes and not terms:
        terms = [draw(body(open_axes))]
    terms += [{"not": draw(body(draw(named)))} for _ in range(draw(st.integers(0, 1)))]
    made: dict = {"activation": activation, "location": list(axes)}
    if terms:
        made["filter"] = list(draw(st.permutations(terms)))
    movable = [axis for axis in axes if axis != "layer"]
    several_values = {axis: st.lists(value(axis), min_size=1, max_size=3, unique=True) for axis in optional}
    if movable and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(movable), unique=True))
        made["group"] = {axis: draw(st.just("all") | several_values[axis]) for axis in chosen}
    if draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(optional), unique=True, max_size=2))
        made["incremental"] = {axis: draw(several_values[axis]) for axis in chosen}
    movable += [axis for axis in made.get("incremental", {}) if axis not in movable]
    if movable and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(movable), unique=True, min_size=1, max_size=2))
        made["combination"] = {"location": chosen, "max_elements": draw(st.integers(1, 3))}
    return {name: part for name, part in made.items() if part}


@st.composite
def located(draw: st.DrawFn) -> tuple[dict, Model]:
    model = draw(models())
    return draw(locators(model)), model


@given(located())
def test_an_index_is_what_brute_force_enumerates(case):
    config, model = case
    expected = enumerated(config, model)
    locator = ModelLocatorConfig.from_config(config)
    if not expected:
        with pytest.raises(LocatorError, match="allow_empty"):
            locator.parse(model.facts(config), model.n_positions)
        locator = ModelLocatorConfig.from_config(config | {"allow_empty": True})
    index = Index(locator, locator.parse(model.facts(config), model.n_positions))
    columns = [*config["location"], *(a for a in config.get("incremental", {}) if a not in config["location"])]
    assert list(index.columns) == [f"source_{name}" for name in [*columns, "activation"]]
    assert list(index) == [
        {f"source_{axis}": row[axis] for axis in columns} | {"source_activation": config["activation"]}
        for row in expected
    ]
    frame = index.to_df()
    for axis in columns:
        held = [row[axis] for row in expected]
        if any(isinstance(cell, list) for cell in held):
            held = [cell if isinstance(cell, list) else [cell] for cell in held]
            assert frame.schema[f"source_{axis}"] == pl.List(pl.Int64)
        elif held:
            assert frame.schema[f"source_{axis}"] == pl.Int64
        assert frame[f"source_{axis}"].to_list() == held


@given(located())
def test_a_locator_is_the_same_once_written_and_read(case):
    locator = ModelLocatorConfig.from_config(case[0])
    written = locator.to_config()
    assert written == case[0]
    assert ModelLocatorConfig.from_config(json.loads(json.dumps(written))) == locator


@given(models(several_prompts=False), st.data())
def test_explicit_rows_are_the_rows_of_the_grid(model, data):
    config = data.draw(locators(model))
    rows = enumerated(config, model)
    assume(rows)
    explicit = {"activation": config["activation"], "coordinates": rows}
    one, other = (ModelLocatorConfig.from_config(fields) for fields in (config, explicit))
    grid = Index(one, one.parse(model.facts(config), model.n_positions))
    assert list(Index(other, other.parse(model.facts(config), model.n_positions))) == list(grid)


@given(located(), st.data())
def test_a_value_past_an_end_is_refused_wherever_it_stands(case, data):
    config, model = case
    sized = [axis for axis in config["location"] if axis not in SYMBOLIC or model.n_positions]
    assume(sized)
    axis = data.draw(st.sampled_from(sized))
    size = max(model.sizes(config["activation"], axis))
    past = data.draw(st.sampled_from([size, -size - 1, size + 7]))
    term = data.draw(st.sampled_from([{axis: past}, {"not": {axis: past}}, {axis: [0, past]}]))
    filters = [*config.get("filter", []), term]
    with pytest.raises(LocatorError):
        ModelLocatorConfig.from_config(config | {"filter": filters}).parse(model.facts(config), model.n_positions)
