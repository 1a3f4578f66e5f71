"""What reading costs: locant's capture against the plain forward of the same model on the same tokens.

python benchmarks/capture.py     writes results/capture.json and the table 'Predicted and seen' of README.md
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import document
import timing

timing.steady("gives back" if "--peak" in sys.argv else "keeps")

import torch  # noqa: E402 - after the allocator is set
import transformers  # noqa: E402

import locant  # noqa: E402

ROUNDS = {(1, 32): 21, (8, 128): 9, (1, 1024): 7}
RESULTS = Path(__file__).parent / "results" / "capture.json"

EVERY_LAYER, ONE_LAYER, PATTERN, EVERYTHING = (
    "`resid_post`, every layer",
    "`resid_post.10`",
    "`attn_probs` of the last layer",
    "every point of every layer",
)
PREDICTED = {EVERY_LAYER: "0.79–0.84", ONE_LAYER: "0.29", EVERYTHING: "≤ 1.15"}


def main() -> None:
    """Measure, keep the numbers, write the table."""
    if "--peak" in sys.argv:
        print(json.dumps(peak()))
        return
    model = locant.load_model()
    rows = list(ratios(model))
    memory = json.loads(subprocess.run([sys.executable, __file__, "--peak"], capture_output=True, check=True).stdout)  # noqa: S603 - itself
    measured: dict[str, Any] = {
        "versions": {
            "locant": locant.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
        "fixed_ms": fixed_cost(model),
        "peak": memory,
        "fresh_seconds_per_gb": fresh_pages(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    document.insert("capture", text(measured))


def ratios(model: locant.EagerModel) -> Iterator[dict[str, Any]]:
    """One row per read and size."""
    last = model.facts.n_layers - 1
    for (batch, length), count in ROUNDS.items():
        ids = tokens(batch, length)
        reads = {
            EVERY_LAYER: [f"resid_post.{layer}" for layer in range(last + 1)],
            ONE_LAYER: ["resid_post.10"],
            PATTERN: [f"attn_probs.{last}"],
        }
        if (batch, length) == (8, 128):
            reads[EVERYTHING] = model.points().served()
        runs: dict[str, timing.Job] = {"plain": lambda ids=ids: plain(model, ids)}
        for name, asked in reads.items():
            runs[name] = lambda asked=asked, ids=ids: model.capture(ids, asked)
        seconds = timing.rounds(runs, count)
        for name in reads:
            ratio = timing.ratio(seconds[name], seconds["plain"])
            print(f"{batch}×{length:<5} {name:32} {ratio}", flush=True)
            yield {
                "read": name,
                "prompts": f"{batch}×{length}",
                "median": round(ratio.median, 3),
                "low": round(ratio.low, 3),
                "high": round(ratio.high, 3),
            }


def fixed_cost(model: locant.EagerModel) -> float:
    """CPU milliseconds of a call on one token, above hooks by hand that read the same."""
    one = tokens(1, 1)
    every = [f"resid_post.{layer}" for layer in range(model.facts.n_layers)]
    seconds = timing.rounds({"hand": lambda: by_hand(model, one), "locant": lambda: model.capture(one, every)}, 201)
    return round(timing.milliseconds(seconds["locant"], seconds["hand"]), 2)


def tokens(batch: int, length: int) -> torch.Tensor:
    """The same tokens in every run."""
    return torch.randint(100, 40_000, (batch, length), generator=torch.Generator().manual_seed(0))


def plain(model: locant.EagerModel, ids: torch.Tensor) -> None:
    """What everything is measured against."""
    with torch.no_grad():
        model.hf(ids)


def by_hand(model: locant.EagerModel, ids: torch.Tensor) -> None:
    """The least a capture of every block can do: one hook a block, the trunk alone, no key-value cache."""
    seen: dict[int, torch.Tensor] = {}
    trunk = model.hf.model
    hooks = [
        block.register_forward_hook(lambda _, __, out, i=i: seen.__setitem__(i, out))
        for i, block in enumerate(trunk.layers)
    ]
    try:
        with torch.no_grad():
            trunk(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def peak() -> dict[str, float]:
    """Memory of every point at 8x128 tokens, in a process of its own, after a call on a few tokens."""
    model = locant.load_model()
    asked = model.points().served()
    model.capture(tokens(1, 8), asked)
    ids = tokens(8, 128)
    used, cache = timing.peak_bytes(lambda: model.capture(ids, asked))
    assert isinstance(cache, locant.Cache)
    return {"peak_bytes": used, "held_bytes": cache.nbytes, "ratio": round(used / cache.nbytes, 3)}


def fresh_pages() -> float:
    """CPU seconds to touch a gigabyte for the first time."""
    size = 1 << 30
    pages = mmap.mmap(-1, size)
    touch = torch.frombuffer(pages, dtype=torch.uint8)[:: mmap.PAGESIZE]
    return round((timing.cpu_seconds(lambda: touch.fill_(1)) - timing.cpu_seconds(lambda: touch.fill_(2))) / 1.0737, 2)


def text(measured: dict[str, Any]) -> str:
    """The table, and what does not fit into it."""
    rows = [
        [
            row["read"],
            row["prompts"],
            PREDICTED.get(row["read"], ""),
            f"{row['median']:.2f} ({row['low']:.2f}–{row['high']:.2f})",
        ]
        for row in measured["rows"]
    ]
    rows.append([f"fixed cost of a call, {EVERY_LAYER}", "1×1", "≤ 1 ms", f"{measured['fixed_ms']:.2f} ms"])
    memory, page = measured["peak"], measured["fresh_seconds_per_gb"]
    held = memory["held_bytes"] / 1e9
    notes = (
        f"Every point at 8×128 tokens holds {held:.2f} GB and peaks at {memory['ratio']:.2f} times that. The kernel of "
        f"this machine spends {page:.2f} CPU seconds on the page faults of a fresh gigabyte, so {held * page:.1f} s on "
        "these, whatever tool holds them."
    )
    return document.table(["read", "prompts", "predicted", "seen"], rows) + f"\n\n{notes}"


if __name__ == "__main__":
    main()
