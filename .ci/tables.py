"""Write the tables of the documents from those of the code, or with ``--check`` only say which are out of date."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from locant import POINTS, Point
from locant.anatomy.identities import IDENTITIES
from locant.anatomy.proof import TOLERANCE
from locant.points import REQUIREMENTS, Service

DOCS = Path(__file__).resolve().parent.parent / "docs"
START, END = "<!-- {} is written by .ci/tables.py -->", "<!-- end -->"
SERVICE = {"hook": "read", "recompute": "rebuilt", "unimplemented": "not yet", "unreachable": "no"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def service(backend: Service) -> str:
    return SERVICE[backend.kind]


def writing(point: Point) -> str:
    return "no" if point.read_only else "yes"


def points() -> str:
    header = ["point", "width", "what it is", "needs", "eager", "vLLM", "writable"]
    return table(
        header,
        (
            [
                f"`{p.name}`",
                f"`{p.width_text}`",
                p.meaning,
                REQUIREMENTS[p.needs],
                service(p.eager),
                service(p.vllm),
                writing(p),
            ]
            for p in POINTS.values()
        ),
    )


def reasons() -> str:
    reasons = [(p, p.vllm.reason) for p in POINTS.values() if p.vllm.reason]
    reasons += [(p, f"Not writable: {p.read_only}.") for p in POINTS.values() if p.read_only]
    grouped: dict[str, list[str]] = {}
    for point, reason in reasons:
        grouped.setdefault(reason, []).append(f"`{point.name}`")
    return table(["points", "reason"], ([", ".join(names), reason] for reason, names in grouped.items()))


def identities() -> str:
    rows = []
    for name, identity in IDENTITIES.items():
        proves = [f"`{p.name}`" for p in POINTS.values() if name in p.proof]
        rows.append([f"`{name}`", f"`{identity.formula}`", ", ".join(proves)])
    return table(["identity", "equation", "proves"], rows)


def tolerances() -> str:
    rows = ([f"`{dtype}`", f"{limit:.0e}"] for dtype, limit in TOLERANCE.items())
    return table(["dtype of the model", "largest error allowed"], rows)


TABLES = {
    "points": ("points.md", points),
    "reasons": ("points.md", reasons),
    "identities": ("proof.md", identities),
    "tolerances": ("proof.md", tolerances),
}


def written(text: str, name: str, rows: str) -> str:
    before, _, rest = text.partition(START.format(name))
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"no place for the table {name!r}: {START.format(name)} … {END}")
    return f"{before}{START.format(name)}\n\n{rows}\n{END}{after}"


def main() -> int:
    stale = []
    for name, (file, rows) in TABLES.items():
        path = DOCS / file
        text = path.read_text(encoding="utf-8")
        new = written(text, name, rows())
        if new != text:
            stale.append(f"{file}: {name}")
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    print("\n".join(stale) or "every table is up to date")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
