"""What finding and proving the points of a model costs, in plain forwards of eight tokens.

python benchmarks/examining.py     writes results/examining.json and the table 'Examining' of README.md
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

import document
import timing
import torch
import transformers

import locant
from locant import EagerModel, load_model

RESULTS = Path(__file__).parent / "results" / "examining.json"
ROUNDS = 9
PREDICTED = {"found and proven anew": "≤ 3", "recalled from disk": "≤ 0.2"}


def main() -> None:
    """Measure in rounds of a forward, an examination and a recall; keep the numbers, write the table."""
    model = load_model()
    ids = torch.arange(100, 108)[None]

    def forward() -> None:
        with torch.no_grad():
            model.hf(input_ids=ids)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOCANT_CACHE"] = folder
        jobs = {"found and proven anew": model.examine, "recalled from disk": lambda: EagerModel(model.hf, recall=True)}
        for job in jobs.values():
            job()
        ratios: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(ROUNDS):
            base = statistics.median(timing.cpu_seconds(forward) for _ in range(3))
            for name, job in jobs.items():
                ratios[name].append(timing.cpu_seconds(job) / base)
    rows = [
        {
            "job": name,
            "median": round(statistics.median(seen), 2),
            "low": round(min(seen), 2),
            "high": round(max(seen), 2),
        }
        for name, seen in ratios.items()
    ]
    versions = {"locant": locant.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    cells = [[str(r["job"]), PREDICTED[str(r["job"])], f"{r['median']} ({r['low']}–{r['high']})"] for r in rows]
    document.insert("examining", document.table(["SmolLM2-135M", "predicted", "seen"], cells))


if __name__ == "__main__":
    timing.steady()
    main()
