"""What reading costs: locant's capture against the plain forward of the same model on the same tokens.

python benchmarks/capture.py            prints the table of benchmarks/README.md and writes results/capture.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import timing

timing.steady()

import torch  # noqa: E402
import transformers  # noqa: E402

import locant  # noqa: E402

SIZES = {(1, 32): 15, (8, 128): 7, (1, 1024): 5}
RESULTS = Path(__file__).parent / "results" / "capture.json"


def main() -> None:
    if "--peak" in sys.argv:
        print(json.dumps(peak()))
        return
    model = locant.load_model()
    last = model.facts.n_layers - 1
    rows: list[dict[str, object]] = []
    for (batch, length), pairs in SIZES.items():
        ids = tokens(batch, length)
        jobs = {
            "`resid_post`, every layer": [f"resid_post.{layer}" for layer in range(last + 1)],
            "`resid_post.10`": ["resid_post.10"],
            f"`attn_probs.{last}`": [f"attn_probs.{last}"],
        }
        if (batch, length) == (8, 128):
            jobs["every point of every layer"] = model.points().served()
        for name, addresses in jobs.items():
            measured = timing.ratio(
                lambda ids=ids: plain(model, ids), lambda a=addresses, i=ids: model.capture(i, a), pairs
            )
            rows.append(
                {"read": name, "prompts": f"{batch}×{length}", "ratio": round(measured.median, 3)}
                | {
                    "low": round(measured.low, 3),
                    "high": round(measured.high, 3),
                    "plain_seconds": round(measured.base_seconds, 3),
                }
            )
            print(f"{batch}×{length:<5} {name:32} {measured}", flush=True)
    one = tokens(1, 1)
    every = [f"resid_post.{layer}" for layer in range(last + 1)]
    fixed = timing.difference(lambda: by_hand(model, one), lambda: model.capture(one, every), 41)
    print(f"fixed cost of a call above hand-written hooks: {fixed:.2f} ms")
    memory = json.loads(subprocess.run([sys.executable, __file__, "--peak"], capture_output=True, check=True).stdout)  # noqa: S603
    print(f"peak memory of every point at 8×128: {memory['ratio']:.3f} of the bytes asked for")
    versions = {"locant": locant.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"versions": versions, "rows": rows, "fixed_ms": round(fixed, 2), "peak": memory}, indent=1)
    )


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(100, 40_000, (batch, length), generator=torch.Generator().manual_seed(0))


def plain(model: locant.EagerModel, ids: torch.Tensor) -> None:
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
    """Memory in a process of its own, after a plain forward has warmed it up."""
    model = locant.load_model()
    ids = tokens(8, 128)
    plain(model, ids)
    asked = model.points().served()
    used, cache = timing.peak_bytes(lambda: model.capture(ids, asked))
    held = cache.nbytes  # pyright: ignore
    return {"peak_bytes": used, "asked_bytes": held, "ratio": round(used / held, 3)}


if __name__ == "__main__":
    main()
