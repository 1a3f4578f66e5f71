"""Survey every family of transformers and write the record and ``docs/FAMILIES.md``, in about a minute.

With ``--check`` only say whether the document is what the record says; ``tests/families`` checks the record itself.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from locant import POINTS
from locant.families import Coverage, Family

ROOT = Path(__file__).resolve().parent.parent
RECORD, DOCUMENT = ROOT / "src" / "locant" / "families.json", ROOT / "docs" / "FAMILIES.md"

GROUPS: Mapping[str, Sequence[str]] = {
    "ends": ["embeddings", "final_norm", "lm_head", "logits"],
    "residual": ["resid_pre", "resid_mid", "resid_post"],
    "contributions": ["attn_out", "attn_out_post", "mlp_out", "mlp_out_post"],
    "inputs": ["attn_in", "mlp_in"],
    "heads": ["query", "key", "value", "query_rotated", "key_rotated", "attn_scores", "attn_probs", "z"],
    "QK-norm": ["q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"],
    "gate": ["attn_gate"],
    "neurons": ["mlp_pre", "mlp_pre_linear", "mlp_act"],
    "router": ["router_logits", "expert_weights", "expert_indices"],
    "streams": [name for name in POINTS if "stream" in name],
}
HEADLINES = {
    "the residual stream and what is added to it": (*GROUPS["residual"], "attn_out_post", "mlp_out_post"),
    "attention, where there are heads": (*GROUPS["heads"], *GROUPS["QK-norm"], *GROUPS["gate"]),
    "the neurons of a dense MLP": GROUPS["neurons"],
    "the router": GROUPS["router"],
    "every point": tuple(POINTS),
}
INTRODUCTION = """\
# Every family

transformers {transformers} names {causal} families of causal language models and {multimodal} of models that also take
images or sound and run on text alone. A small model of each, with random weights, was surveyed and proven as every
model is when it is loaded (torch {torch}). No family has code of its own here: structure finds the points and the
[proof](proof.md) decides. `locant families FAMILY` prints one family point by point, and `locant points MODEL` asks
your own model.

The table is written by `python .ci/families.py` from the record that `locant families` reads, and the tests survey
every family again.
"""
LEGEND = """\
`✓` every point of the column that the family has is proven at every layer · `✗` these are refused, by name, for the
reasons [below](#refusals) · `–` the family has none of them, `…` not surveyed yet · `family:variant` is another layout
of the same code
"""


def proven_share(families: Sequence[Family], names: Sequence[str]) -> str:
    """How many of the families that have one of the points have each of them proven that they have."""
    everywhere = {"resid_pre", "resid_post"} <= set(names)
    families = [f for f in families if everywhere or not whole(f)]
    having = [f for f in families if any(f.points[n].state in ("proven", "refused") for n in names)]
    good = [f for f in having if all(f.points[n].state in ("proven", "not applicable") for n in names)]
    return f"{len(good)} of {len(having)} ({100 * len(good) // max(1, len(having))} %)"


def cell(family: Family, names: Sequence[str]) -> str:
    states = {family.points[name].state for name in names}
    refused = [f"`{name}`" for name in names if family.points[name].state == "refused"]
    if len(refused) == len(names) > 1:
        return "✗ all"
    if refused:
        return f"✗ {', '.join(refused)}"
    return "✓" if "proven" in states else "…" if "not yet" in states else "–"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def document(coverage: Coverage) -> str:
    families = list(coverage.families.values())
    kinds = {kind: [f for f in families if f.kind == kind] for kind in ("causal", "multimodal")}
    sizes = {kind: len(members) for kind, members in kinds.items()}
    parts = [INTRODUCTION.format(**coverage.versions, **sizes), "\n## How much is proven\n\n"]
    parts += [row(["on the families that have them", "causal", "multimodal"]), row(["---"] * 3)]
    for name, points in HEADLINES.items():
        parts.append(row([name, *(proven_share(kinds[kind], points) for kind in ("causal", "multimodal"))]))
    parts.append("\nA family that is refused as a whole counts in the first line and the last one.\n")
    parts += ["\n## Family by family\n\n", LEGEND, "\n", row(["family", *GROUPS]), row(["---"] * (len(GROUPS) + 1))]
    for family in families:
        if not whole(family):
            parts.append(row([f"`{family.name}`", *(cell(family, names) for names in GROUPS.values())]))
    parts += ["\n## Refusals\n\n", row(["reason", "points", "families"]), row(["---"] * 3), *refusals(families)]
    parts += ["\n## Families that are not served at all\n\n", row(["reason", "families"]), row(["---"] * 2)]
    reasons: dict[str, list[str]] = {}
    for family in filter(whole, families):
        # a reason that starts with the class of the model is the same for all
        reason = next(iter(family.points.values())).reason
        reasons.setdefault(reason.split(":", 1)[-1].strip(), []).append(f"`{family.name}`")
    parts += [row([escaped(reason), ", ".join(names)]) for reason, names in reasons.items()]
    return "".join(parts)


def whole(family: Family) -> bool:
    """It is refused, or not yet surveyed, as a whole."""
    outcomes = set(family.points.values())
    return len(outcomes) == 1 and outcomes.pop().state in ("refused", "not yet")


def refusals(families: Sequence[Family]) -> Iterator[str]:
    """Each reason, with the points and the families it is given for."""
    given: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for family in families:
        for name, outcome in family.points.items():
            if outcome.state == "refused" and not whole(family):
                points, names = given.setdefault(outcome.reason.partition(" (layers ")[0], ({}, {}))
                points[f"`{name}`"] = names[f"`{family.name}`"] = None
    for reason, (points, names) in given.items():
        yield row([escaped(reason), ", ".join(points), ", ".join(names)])


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def survey() -> Coverage:
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "LOCANT_CACHE": ""}
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "tests"))
    from zoo.survey import EVERY, surveyed, versions

    return Coverage(versions(), {name: surveyed(name) for name in EVERY})


def main() -> int:
    if "--check" in sys.argv:
        stale = DOCUMENT.read_text(encoding="utf-8") != document(Coverage.recorded())
        print("docs/FAMILIES.md is out of date: python .ci/families.py" if stale else "docs/FAMILIES.md is up to date")
        return int(stale)
    coverage = survey()
    RECORD.write_text(coverage.text(), encoding="utf-8")
    DOCUMENT.write_text(document(coverage), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
