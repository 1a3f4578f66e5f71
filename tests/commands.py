"""The command line, run in this process."""

from dataclasses import dataclass

from typer.testing import CliRunner

from locant.cli import app


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str


def run(*arguments: object, stdin: str | None = None) -> Done:
    result = CliRunner().invoke(
        app, [str(a) for a in arguments], input=stdin, catch_exceptions=False, prog_name="locant"
    )
    return Done(result.exit_code, result.stdout, result.stderr)
