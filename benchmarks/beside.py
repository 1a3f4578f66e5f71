"""One rival in one process with locant and the plain forward: the same weights, the same tokens, the runs interleaved.

python benchmarks/beside.py RIVAL FOLDER OUT           check the values, then time every job
python benchmarks/beside.py RIVAL FOLDER OUT --fresh   time the jobs that hold much memory, starting without any
python benchmarks/beside.py TOOL FOLDER OUT --peak     memory of everything, in a process of its own
python benchmarks/beside.py locant FOLDER --make       write the embedded model to a folder

benchmarks/rivals.py starts this with the rival's own Python; FOLDER holds the model, OUT is a JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timing

timing.steady("gives back" if "--peak" in sys.argv else "unset" if "--fresh" in sys.argv else "keeps")

import torch  # noqa: E402 - after the allocator is set
from adapters import Tool, tool  # noqa: E402
from adapters.plain import load  # noqa: E402
from torch import Tensor  # noqa: E402

SHARED = ("locant", "torch", "transformers")
ROUNDS = {"residuals 1x32": 11, "residuals 8x128": 5, "residuals 1x1024": 5, "residual 8x128": 5, "pattern 1x1024": 5}
ROUNDS |= {"everything 8x128": 5, "fixed 1x1": 61}
HOLD_MUCH = {"residuals 1x1024": 3, "pattern 1x1024": 3, "everything 8x128": 3}
ONE_LAYER = 10


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--rounds", type=int, help="of every job, for a quick look")
    args = parser.parse_args()
    if args.make:
        make_model(args.folder)
        return
    with torch.no_grad():
        if args.peak:
            measured = memory(args.name, args.folder)
        else:
            rounds = HOLD_MUCH if args.fresh else ROUNDS
            counts = {job: args.rounds or count for job, count in rounds.items()}
            measured = race(args.name, args.folder, counts, trimmed=args.fresh)
    Path(args.out).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def make_model(folder: str) -> None:
    """Every tool can load a folder; few can load a GGUF file."""
    import locant

    model = locant.load_model()
    model.hf.save_pretrained(folder)
    assert model.tokenizer is not None
    model.tokenizer.save_pretrained(folder)


def tokens(batch: int, length: int) -> Tensor:
    """The same tokens in every process."""
    return torch.randint(100, 40_000, (batch, length), generator=torch.Generator().manual_seed(0))


def race(name: str, folder: str, rounds: Mapping[str, int], *, trimmed: bool) -> dict[str, Any]:
    """Check one rival's values, and time it beside locant."""
    model = load(folder)
    tools = {"locant": tool("locant", folder), "rival": tool(name, folder)}
    rival = tools["rival"]
    layers = range(model.config.num_hidden_layers)
    checks = {which: check(each, folder, layers) for which, each in tools.items()}
    print(name, checks, flush=True)
    seconds: dict[str, dict[str, list[float]]] = {}
    for title, count in rounds.items():
        job, _, size = title.partition(" ")
        if job in rival.cannot:
            continue
        batch, length = map(int, size.split("x"))
        ids = tokens(batch, length)
        runs: dict[str, timing.Job] = {"plain": lambda ids=ids: model(ids)}
        for which, each in tools.items():
            runs[which] = lambda each=each, job=job, ids=ids: run(each, job, ids, layers)
        if job in ("residuals", "fixed"):
            runs["first call"] = lambda ids=ids: rival.residuals(ids, layers, thrifty=False)
        seconds[title] = timing.rounds(runs, count, trimmed=trimmed)
        ratios = {which: timing.ratio(seconds[title][which], seconds[title]["plain"]) for which in runs}
        print(name, title, {which: str(ratio) for which, ratio in ratios.items()}, flush=True)
    packages = {package: version(package) for package in (*rival.packages, *SHARED)}
    texts = {"title": rival.title, "settings": rival.settings, "first_call": rival.first_call}
    rounded = {title: {w: [round(s, 5) for s in each] for w, each in jobs.items()} for title, jobs in seconds.items()}
    return {"versions": packages, **texts, "cannot": dict(rival.cannot), "differences": checks, "seconds": rounded}


def run(each: Tool, job: str, ids: Tensor, layers: Sequence[int]) -> object:
    """One job of those that are timed."""
    match job:
        case "residuals" | "fixed":
            return each.residuals(ids, layers)
        case "residual":
            return each.residuals(ids, [ONE_LAYER])
        case "pattern":
            return each.pattern(ids, layers[-1])
        case _:
            return each.everything(ids)


def check(each: Tool, folder: str, layers: Sequence[int]) -> dict[str, float]:
    """Largest difference from hooks on the plain model, over the largest value there."""
    ids = tokens(2, 48)
    plain = tool("by-hand", folder)
    wanted = plain.residuals(ids, layers, thrifty=False)
    found = {
        "residuals": apart(each.residuals(ids, layers), wanted),
        "first call": apart(each.residuals(ids, layers, thrifty=False), wanted),
        "residual": apart(each.residuals(ids, [ONE_LAYER]), [wanted[ONE_LAYER]]),
        "everything": min(
            apart([value], [wanted[ONE_LAYER]])
            for value in each.everything(ids).values()
            if value.shape == wanted[ONE_LAYER].shape
        ),
    }
    if "pattern" not in each.cannot:
        found["pattern"] = apart([each.pattern(ids, layers[-1])], [plain.pattern(ids, layers[-1])])
    return found


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative difference of two lists of tensors."""
    pairs = list(zip(found, wanted, strict=True))
    assert all(f.shape == w.shape for f, w in pairs), [(f.shape, w.shape) for f, w in pairs]
    return float(f"{max(float((f - w).abs().max() / w.abs().max()) for f, w in pairs):.1e}")


def memory(name: str, folder: str) -> dict[str, Any]:
    """What everything at 8x128 tokens holds and peaks at, after one call on a few tokens."""
    each = tool(name, folder)
    each.everything(tokens(1, 8))
    ids = tokens(8, 128)
    peak, read = timing.peak_bytes(lambda: each.everything(ids))
    assert isinstance(read, Mapping)
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in read.values()}
    return {"names": len(read), "tensors": len(held), "held_bytes": sum(held.values()), "peak_bytes": peak}


if __name__ == "__main__":
    main()
