"""The command line: ``locant points``, ``capture``, ``show``, ``index``, ``families`` and ``demo``.

This file holds what ``--help`` needs and nothing slower; a command imports its work when it runs.

Exit codes: 0 done, 1 a :class:`~locant.errors.LocantError` (one message on stderr), 2 a wrong command line,
130 interrupted.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from locant import __version__
from locant.errors import LocantError

if TYPE_CHECKING:
    from locant.cli.model import Source

DEFAULT_MODEL = "smollm2-135m"
"""What ``locant.load.EMBEDDED`` says too; that module imports torch."""

DEMO_FILE = Path("locant-demo.safetensors")


class Dtype(StrEnum):
    """What a model's weights can be cast to."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class _Commands(TyperGroup):
    """Commands whose mistakes end in one message and an exit code, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LocantError as error:
            typer.echo(_message(error), err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            typer.echo("\nlocant: interrupted", err=True)
            raise typer.Exit(130) from interrupt


def _message(error: LocantError) -> str:
    """What was asked, what there is and what to do: a line each."""
    lines = [f"locant: {error.asked}"]
    lines += [f"  there is:  {error.has}"] if error.has else []
    lines += [f"  instead:   {error.instead}"] if error.instead else []
    return "\n".join(lines)


app = typer.Typer(
    cls=_Commands,
    name="locant",
    help="Name every tensor of a transformer's forward pass, and read it.",
    epilog="Start with: locant demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"locant {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _locant(
    ctx: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback has done the work
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a folder, a .gguf file, or the embedded model.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", help="Cast the weights.", show_default="the checkpoint's own")
]
DeviceOption = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="Where to run, e.g. cuda:0.")]
AttentionOption = Annotated[
    str | None,
    typer.Option("--attn", metavar="NAME", help="The attention implementation, e.g. eager or sdpa."),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="The hub's branch, tag or commit.")
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def _source(
    model: str,
    dtype: Dtype | None,
    device: str | None,
    attention: str | None,
    revision: str | None,
    *,
    trust: bool,
) -> "Source":
    from locant.cli.model import Source

    return Source(model, dtype and dtype.value, device, attention, revision, trust)


@app.command()
def points(
    *,
    model: Model = DEFAULT_MODEL,
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="N", min=0, help="Only the points of this layer.")
    ] = None,
    served: Annotated[bool, typer.Option("--served", help="Only what can be captured.")] = False,
    refused: Annotated[bool, typer.Option("--refused", help="Only what cannot, and why.")] = False,
    json: JsonOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    attn: AttentionOption = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """List every point of a model: served and where, or why not.

    A served point is proven on the loaded weights; the error is how far its identities are from holding.
    """
    from locant.cli import listing

    source = _source(model, dtype, device, attn, revision, trust=trust_remote_code)
    everything = served == refused
    listing.run(source, layer, served=served or everything, refused=refused or everything, as_json=json)


@app.command()
def capture(
    *,
    model: Model = DEFAULT_MODEL,
    address: Annotated[
        list[str],
        typer.Option("--address", "-a", metavar="ADDRESS", help="What to read, e.g. resid_post.5. Once per address."),
    ],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Once per prompt.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option("--prompts-file", metavar="FILE", help="One prompt per line; - is standard input."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The safetensors file to write.")
    ] = Path("capture.safetensors"),
    positions: Annotated[
        str | None,
        typer.Option("--positions", metavar="N,N", help="Only these tokens; -1 is each prompt's last."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file if it exists.")] = False,
    bos: Annotated[
        bool, typer.Option("--bos/--no-bos", help="Put the tokenizer's BOS before text that has none.")
    ] = True,
    json: JsonOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    attn: AttentionOption = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Run prompts, and save the tensors at the places you name.

    In bash, -aresid_post.{0..29} names a point at thirty layers.
    """
    from locant.cli import capturing

    source = _source(model, dtype, device, attn, revision, trust=trust_remote_code)
    request = capturing.Request(address, prompt or [], prompts_file, positions, bos)
    capturing.run(source, request, output, force=force, as_json=json)


@app.command()
def show(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that locant capture or Cache.save wrote.")],
    json: JsonOption = False,
) -> None:
    """Say what a saved capture holds and where it comes from."""
    from locant.cli import capturing

    capturing.show(file, as_json=json)


@app.command()
def families(
    *,
    family: Annotated[
        str | None, typer.Argument(metavar="FAMILY", help="A model_type of transformers, e.g. gemma3_text.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what is proven on every family of models, and what is not.

    This is the record of a survey of small random models, one of each family that transformers knows.
    """
    from locant.cli import coverage

    coverage.run(family, as_json=json)


@app.command()
def index(
    *,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML or JSON file, or in braces the YAML itself.")],
    facts: Annotated[
        str,
        typer.Option(
            "--facts", metavar="FACTS", help="Whose sizes: a model, of which only the config is read, or a JSON file."
        ),
    ] = DEFAULT_MODEL,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            "-t",
            metavar="N[,N]",
            help="Tokens of the prompt, or of each prompt.",
            show_default="positions stay as they are written",
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="Print that many; 0 prints all.")] = 20,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the rows as CSV.")] = None,
    json: JsonOption = False,
) -> None:
    """Print the rows a locator resolves to, without loading a model.

    The config is a locator, or has locators under source and target. Sizes are checked. Whether a layer has the
    activation at all is known once the model is loaded.
    """
    from locant.cli import indexing

    indexing.run(config, facts, tokens, rows, output, as_json=json)


@app.command()
def demo(
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the captured tensors go.")
    ] = DEMO_FILE,
) -> None:
    """Show locant at work on a real model, in half a minute."""
    from locant.cli import showcase

    showcase.run(output)


def main() -> None:
    """Run the command line; what the script ``locant`` calls."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")  # a terminal without the letters of a token still shows the rest
    app()
