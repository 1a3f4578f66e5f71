"""The readme and the documents: their code runs, their output is what comes out, their tables are the code's."""

import ast
import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import families
import locant
from commands import run

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def named(documents: list[Path]) -> list:
    return [pytest.param(path, id=path.name) for path in documents]


def blocks(path: Path) -> list[tuple[str, str, int]]:
    """Language, text and first line of every fenced block."""
    text = path.read_text(encoding="utf-8")
    return [(m["language"], m["body"], text[: m.start()].count("\n") + 2) for m in BLOCK.finditer(text)]


def steady(text: str) -> list[str]:
    """Lines of output without what depends on the machine: rounding errors, versions, seconds, widths of columns."""
    text = re.sub(r"(?<!\S)(0|\d(\.\d)?e-\d\d)(?!\S)", "#", text)
    text = re.sub(r"\b(locant|torch|transformers) \d[\w.+]*", r"\1 #", text)
    text = re.sub(r"in \d+ s\b", "in # s", text)
    text = re.sub(r"^(Saved .* )\(.*\)", r"\1(#)", text, flags=re.MULTILINE)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def is_shown(real: list[str], shown: list[str]) -> bool:
    """Whether the output is what a document shows of it, where a line ``...`` stands for any lines."""
    if not shown:
        return not real
    if shown[0] == "...":
        return any(is_shown(real[i:], shown[1:]) for i in range(len(real) + 1))
    return bool(real) and real[0] == shown[0] and is_shown(real[1:], shown[1:])


def compare(real: str, shown: str) -> None:
    assert is_shown(steady(real), steady(shown)), f"shown:\n{shown}\nreal:\n{real}"


def check(code: str, line: int, path: Path, names: dict[str, object]) -> str:
    """Run a block; an expression with a comment behind it has that value. Returns what was printed."""
    lines = code.splitlines()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for statement in ast.parse(code).body:
            ast.increment_lineno(statement, line - 1)
            if not isinstance(statement, ast.Expr):
                exec(compile(ast.Module([statement], []), path, "exec"), names)
                continue
            value = eval(compile(ast.Expression(statement.value), path, "eval"), names)
            assert statement.end_lineno is not None
            _, mark, comment = lines[statement.end_lineno - line].encode()[statement.end_col_offset :].partition(b"#")
            if mark:
                said = comment.decode().strip()
                assert repr(value) == said or value == ast.literal_eval(said), (
                    f"{path.name}:{statement.lineno}: {value!r}"
                )
    return printed.getvalue()


@pytest.mark.parametrize("path", named([p for p in DOCUMENTS if any(b[0] == "python" for b in blocks(p))]))
def test_the_code_runs_and_shows_what_it_says(path, embedded, tmp_path, monkeypatch):
    load_model = locant.load_model
    monkeypatch.setattr(locant, "load_model", lambda *source: load_model(*source) if source else embedded)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = ""
    for language, body, line in blocks(path):
        if language == "text":
            compare(printed, body)
            printed = ""
        if language == "python":
            assert printed == "", f"{path.name}:{line}: the block before prints, and its output is not shown"
            printed = check(body, line, path, names)
    assert printed == ""


@pytest.mark.parametrize("path", named([p for p in DOCUMENTS if any(b[0] == "console" for b in blocks(p))]))
def test_the_commands_run_and_show_what_they_say(path, embedded_at_once, in_a_terminal, tmp_path, monkeypatch):
    in_a_terminal(100)
    monkeypatch.chdir(tmp_path)
    for language, body, _ in blocks(path):
        for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:] if language == "console" else []:
            command, _, shown = session.partition("\n")
            program, *arguments = shlex.split(command)
            assert program == "locant"
            done = run(*arguments)
            compare(done.out + done.err, shown)


def test_a_document_that_is_wrong_is_found_out(tmp_path):
    with pytest.raises(AssertionError):
        check("1 + 1  # 3", 1, tmp_path, {})
    with pytest.raises(AssertionError):
        compare("a\nb\nc", "a\n...\nd")
    compare("a\nb\nc", "a\n...")
    compare("error 2e-07", "error 3e-07")


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_every_block_is_of_a_kind_that_is_checked(path):
    assert {language for language, _, _ in blocks(path)} <= {"python", "text", "console", "sh"}


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_the_public_names_and_points_that_are_mentioned_exist(path):
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"^from locant import (.+)", text, re.MULTILINE):
        assert set(name.split(", ")) <= set(locant.__all__)
    for address in re.findall(r"`([a-z_]+)\.\d+`", text):
        assert address in locant.POINTS


def test_the_tables_are_those_of_the_code():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "tables.py", "--check"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "every table is up to date\n")


def test_a_table_that_is_out_of_date_is_found_out(tmp_path, monkeypatch, capsys):
    tables = runpy.run_path(str(ROOT / ".ci" / "tables.py"))
    for name in ("points.md", "proof.md"):
        (tmp_path / name).write_text((ROOT / "docs" / name).read_text(encoding="utf-8").replace("`float64`", "`f64`"))
    tables["main"].__globals__["DOCS"] = tmp_path
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables["main"]() == 1
    assert "proof.md: tolerances\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables["main"]() == 0
    assert "`float64`" in (tmp_path / "proof.md").read_text(encoding="utf-8")


def test_the_document_of_every_family_is_that_of_the_record(tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(ROOT / ".ci" / "families.py"))
    monkeypatch.setattr(sys, "argv", ["families.py", "--check"])
    assert script["main"]() == 0
    stale = (ROOT / "docs" / "FAMILIES.md").read_text(encoding="utf-8").replace("| `llama` |", "| `lama` |")
    script["main"].__globals__["DOCUMENT"] = tmp_path / "FAMILIES.md"
    (tmp_path / "FAMILIES.md").write_text(stale, encoding="utf-8")
    assert script["main"]() == 1
    assert "python .ci/families.py" in capsys.readouterr().out


def test_the_readme_names_every_family_that_is_tested():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`(\w+For\w+|\w+LMHeadModel)`", text))
    assert said == {family.cls for family in families.FAMILIES.values()}
