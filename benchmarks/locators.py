"""What an index of a million rows costs, against the same table made with polars alone and from dictionaries.

python benchmarks/locators.py     writes results/locators.json and the table 'Indexes' of README.md
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import document
import polars as pl
import timing

import locant
from locant import Facts, Index, ModelLocatorConfig

RESULTS = Path(__file__).parent / "results" / "locators.json"
RUNS = 5
SIZES = {"layer": 10, "head": 10, "position": 100, "neuron": 100}
FACTS = Facts.from_dict({"n_layers": 10, "n_heads": 10, "head_dim": 100})
GRID = {"activation": "attn.z", "location": list(SIZES)}
COORDINATES = [{"layer": i % 10, "head": i // 10 % 10, "position": i % 100} for i in range(1_000_000)]


def index(config: Mapping[str, object]) -> Index:
    """From the config to the rows, and the tensors that they read."""
    locator = ModelLocatorConfig.from_config(config)
    made = Index(locator, locator.parse(FACTS, SIZES["position"]))
    assert made.addresses
    return made


def by_locant(**config: object) -> Callable[[], pl.DataFrame]:
    """The index as a table."""
    return lambda: index(GRID | config).to_df()


def by_polars() -> pl.DataFrame:
    """The grid as joins of columns."""
    axes = [pl.LazyFrame({f"source_{axis}": range(size)}) for axis, size in SIZES.items()]
    first, *others = axes
    for axis in others:
        first = first.join(axis, how="cross")
    return first.with_columns(source_activation=pl.lit("attn.z")).collect()


def by_dictionaries() -> pl.DataFrame:
    """The grid as a list with a dictionary for each row."""
    names = [f"source_{axis}" for axis in SIZES]
    rows = [dict(zip(names, values, strict=True)) for values in product(*map(range, SIZES.values()))]
    return pl.DataFrame([row | {"source_activation": "attn.z"} for row in rows])


JOBS: Mapping[str, Callable[[], pl.DataFrame]] = {
    "locant, the grid": by_locant(),
    "polars, the same by cross joins": by_polars,
    "a list of dictionaries, the same": by_dictionaries,
    "locant, a filter of three terms": by_locant(
        filter=[{"layer": {"range": [0, 8]}}, {"head": 1}, {"not": {"neuron": 3}}]
    ),
    "locant, two heads grouped": by_locant(group={"head": [1, 2]}),
    "locant, growing lists of neurons": by_locant(
        location=["layer", "head", "position"], incremental={"neuron": list(range(100))}
    ),
    "locant, a coordinate for each row": lambda: index({"activation": "attn.z", "coordinates": COORDINATES}).to_df(),
}


def main() -> None:
    """Measure each job in a process of its own, keep the numbers, write the table."""
    if len(sys.argv) > 1:
        print(json.dumps(measured(JOBS[sys.argv[1]])))
        return
    assert by_locant()().sort(pl.all()).equals(by_polars().sort(pl.all()))
    rows = []
    for name in JOBS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, check=True)  # noqa: S603 - itself
        rows.append({"job": name, **json.loads(done.stdout)})
        print(rows[-1], file=sys.stderr)
    versions = {"locant": locant.__version__, "polars": pl.__version__}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    header = ["table", "rows", "CPU seconds", "peak memory"]
    cells = [[r["job"], f"{r['rows']:,}", f"{r['seconds']:.2f}", f"{r['peak'] / 1e6:.0f} MB"] for r in rows]
    document.insert("locators", document.table(header, cells))


def measured(job: Callable[[], pl.DataFrame]) -> dict[str, float]:
    """The peak of the first run above where it began, and the median CPU seconds of some more."""
    peak, table = timing.peak_bytes(job)
    assert isinstance(table, pl.DataFrame)
    seconds = statistics.median(timing.cpu_seconds(job) for _ in range(RUNS))
    return {"rows": len(table), "seconds": round(seconds, 3), "peak": peak}


if __name__ == "__main__":
    timing.steady("unset")
    main()
