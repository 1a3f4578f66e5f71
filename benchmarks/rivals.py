"""The same captures by other tools: each runs in its own environment, beside locant and the plain forward.

python benchmarks/rivals.py --envs FOLDER [--model FOLDER] [RIVAL ...]   run, then write the tables of README.md
python benchmarks/rivals.py                                              write the tables from results/ only

FOLDER of --envs holds one environment per rival, made as README.md says; without --model the embedded model is used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import document
from adapters import RIVALS

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "rivals"
COLUMNS = {
    "residuals 1x32": "every `resid_post`, 1×32",
    "residuals 8x128": "8×128",
    "residuals 1x1024": "1×1024",
    "residual 8x128": "`resid_post.10` alone, 8×128",
    "pattern 1x1024": "one attention pattern, 1×1024",
    "fixed 1x1": "fixed cost, ms",
}
FRESH = {
    "residuals 1x1024": "every `resid_post`, 1×1024",
    "pattern 1x1024": "one attention pattern, 1×1024",
    "everything 8x128": "everything, 8×128",
}
Seconds = Mapping[str, Mapping[str, Sequence[float]]]


def main() -> None:
    """Run what the command line names, then write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rivals", nargs="*", choices=[[], *RIVALS])
    parser.add_argument("--envs", type=Path)
    parser.add_argument("--model")
    args = parser.parse_args()
    if args.envs:
        with tempfile.TemporaryDirectory() as made:
            model = args.model
            if model is None:
                model = made
                start(args.envs, RIVALS[0], "locant", model, "--make")
            for rival in args.rivals or RIVALS:
                measure(args.envs, rival, model)
                document.insert("rivals", tables())
    document.insert("rivals", tables())


def measure(envs: Path, rival: str, model: str) -> None:
    """All that is measured of one rival, into its file of results."""
    measured = start(envs, rival, rival, model)
    measured["fresh"] = start(envs, rival, rival, model, "--fresh")["seconds"]
    measured["memory"] = {name: start(envs, rival, name, model, "--peak") for name in (rival, "locant")}
    RESULTS.mkdir(parents=True, exist_ok=True)
    RESULTS.joinpath(f"{rival}.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def start(envs: Path, env: str, *args: str) -> dict[str, Any]:
    """Run beside.py in one environment, and give what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        name, model, *options = args
        command = [envs / env / "bin" / "python", HERE / "beside.py", name, model, out, *options]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})  # noqa: S603 - ours
        return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


def tables() -> str:
    """Every table, from the files of results."""
    runs = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files()}
    return "\n\n".join(
        [
            "CPU seconds over those of the plain forward: the median of the rounds, and their range.",
            document.table(["", *COLUMNS.values()], ratios(runs)),
            "Everything that one call can read, 8×128 tokens:",
            document.table(
                ["", "names", "tensors", "held, MB", "peak, MB", "over the plain forward", "largest difference"],
                everything(runs),
            ),
            "The same where no run finds memory that an earlier one freed, so that every page is fresh:",
            document.table(["", *FRESH.values()], fresh(runs)),
            "What each was given:",
            "\n".join(settings(runs)),
        ]
    )


def files() -> Iterator[tuple[str, Path]]:
    """The results there are, in the order of the rivals."""
    for rival in RIVALS:
        path = RESULTS / f"{rival}.json"
        if path.exists():
            yield rival, path


def ratios(runs: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for locant, from all processes together; one or two per rival."""
    yield ["**locant**", *(cell(job, [run["seconds"] for run in runs.values()], "locant") for job in COLUMNS)]
    for run in runs.values():
        title = f"{run['title']} {version(run)}".strip()
        yield [title, *(cell(job, [run["seconds"]], "rival") for job in COLUMNS)]
        yield [f"{title}, first call", *(cell(job, [run["seconds"]], "first call") for job in COLUMNS)]


def everything(runs: Mapping[str, Any]) -> Iterator[list[str]]:
    """What each holds, and what that costs."""
    ours = next(iter(runs.values()))
    together = [run["seconds"] for run in runs.values()]
    yield ["**locant**", *memory(ours["memory"]["locant"]), cell("everything 8x128", together, "locant"), worst(runs)]
    for name, run in runs.items():
        timed = cell("everything 8x128", [run["seconds"]], "rival")
        if "memory" not in run:
            yield [run["title"], "", "", "", "", timed, f"{max(run['differences']['rival'].values()):.0e}"]
            continue
        largest = f"{max(run['differences']['rival'].values()):.0e}"
        yield [run["title"], *memory(run["memory"][name]), timed, largest]


def worst(runs: Mapping[str, Any]) -> str:
    """The largest difference that locant had in any process."""
    return f"{max(max(run['differences']['locant'].values()) for run in runs.values()):.0e}"


def fresh(runs: Mapping[str, Any]) -> Iterator[list[str]]:
    """The jobs that hold much memory, when every round has to ask for it again."""
    measured = [run for run in runs.values() if "fresh" in run]
    yield ["**locant**", *(cell(job, [run["fresh"] for run in measured], "locant") for job in FRESH)]
    for run in measured:
        yield [run["title"], *(cell(job, [run["fresh"]], "rival") for job in FRESH)]
        if "first call" in run["fresh"]["residuals 1x1024"]:
            yield [f"{run['title']}, first call", *(cell(job, [run["fresh"]], "first call") for job in FRESH)]


def settings(runs: Mapping[str, Any]) -> Iterator[str]:
    """What a reader can check."""
    for run in runs.values():
        missing = "".join(f" Left out: {why}." for why in run["cannot"].values())
        yield f"- {run['title']}: {run['settings']}.{missing} First call: {run['first_call']}."


def cell(job: str, seconds: Sequence[Seconds], which: str) -> str:
    """A ratio with its range; milliseconds above the plain forward for the fixed cost."""
    rounds = [
        (own, plain)
        for each in seconds
        if which in each.get(job, {})
        for own, plain in zip(each[job][which], each[job]["plain"], strict=True)
    ]
    if not rounds:
        return ""
    if job.startswith("fixed"):
        return f"{1e3 * statistics.median(own - plain for own, plain in rounds):.1f}"
    found = sorted(own / plain for own, plain in rounds)
    return f"{statistics.median(found):.2f} ({found[0]:.2f}–{found[-1]:.2f})"


def memory(measured: Mapping[str, int]) -> list[str]:
    """Counts, then megabytes."""
    held, peak = (f"{measured[name] / 1e6:,.0f}" for name in ("held_bytes", "peak_bytes"))
    return [str(measured["names"]), str(measured["tensors"]), held, peak]


def version(run: Mapping[str, Any]) -> str:
    """The rival's own; its dependencies and the rest stand in the results."""
    return next((v for package, v in run["versions"].items() if package not in ("locant", "torch", "transformers")), "")


if __name__ == "__main__":
    main()
