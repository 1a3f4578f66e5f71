"""Print the package's size, and fail when a file, a function or the whole outgrows its ceiling."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "locant"
# Finding and proving the points of three hundred families takes a third of the house, more than was foreseen when the
# ceiling was 12,000; generation, the operations and a second backend need the room that was meant for them.
PACKAGE_LINES = 16_000
FILE_LINES = {"fail": 600, "warn": 400}
FUNCTION_LINES = {"fail": 100, "warn": 60}


def too_long(what: str, lines: int, ceilings: dict[str, int]) -> Iterator[tuple[str, str]]:
    for level, ceiling in ceilings.items():
        if lines > ceiling:
            yield level, f"{level}: {what} has {lines} lines, more than {ceiling}"
            return


def findings(path: Path, text: str) -> Iterator[tuple[str, str]]:
    name = path.relative_to(ROOT)
    yield from too_long(str(name), len(text.splitlines()), FILE_LINES)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            yield from too_long(f"{name}:{node.lineno} {node.name}", lines, FUNCTION_LINES)


def main() -> int:
    sizes: Counter[str] = Counter()
    found: list[tuple[str, str]] = []
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        sizes[str(path.parent.relative_to(ROOT.parent))] += len(text.splitlines())
        found += findings(path, text)
    for package, lines in sorted(sizes.items()):
        print(f"{lines:7,}  {package}")
    print(f"{sizes.total():7,}  of {PACKAGE_LINES:,} lines")
    found += too_long("the package", sizes.total(), {"fail": PACKAGE_LINES})
    for _, message in found:
        print(message)
    return int(any(level == "fail" for level, _ in found))


if __name__ == "__main__":
    sys.exit(main())
