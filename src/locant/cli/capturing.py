"""``locant capture`` and ``locant show``: tensors into a file, and what such a file holds."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.text import Text
from torch import Tensor

from locant.address import Address, format_address, to_address
from locant.cli.listing import running_line
from locant.cli.model import Source
from locant.cli.terminal import Cell, Column, Terminal, progress, visible
from locant.engine.cache import Cache, bytes_text, spans_of
from locant.errors import CacheError, PromptError

TENSORS = (
    Column("point", style="cyan", wraps=True),
    Column("layers"),
    Column("shape", right=True),
    Column("dtype"),
    Column("size", right=True),
    Column("proof", wraps=True),
)
_SHOWN_PROMPTS = 8
_SHOWN_TOKENS = 60
_PROOF = re.compile(r"(?P<state>\w+) \((?P<error>[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line says of the capture."""

    addresses: Sequence[str]
    prompts: Sequence[str]
    prompts_file: str | None = None
    positions: str | None = None
    bos: bool = True


def run(source: Source, request: Request, output: Path, *, force: bool, as_json: bool) -> None:
    """Check all that can be checked without the model, load it, capture, save and report.

    Raises:
        LocantError: of any kind; nothing was written then.
    """
    addresses = [to_address(text) for text in request.addresses]
    prompts = [*request.prompts, *_lines(request.prompts_file)]
    if not prompts:
        raise PromptError("no prompts", instead="pass --prompt TEXT, or --prompts-file FILE")
    positions = _positions(request.positions)
    check_output(output, force=force)
    model = source.load()
    model.plan(addresses)
    with progress(f"Reading {len(addresses)} tensors of {len(prompts)} prompts"):
        cache = model.capture(prompts, addresses, positions=positions, prepend_bos=request.bos)
        cache.save(output)
    _report(cache, output, as_json=as_json)


def show(file: Path, *, as_json: bool) -> None:
    """Report on a saved capture.

    Raises:
        CacheError: the file is not there or is no capture.
    """
    if not file.is_file():
        raise CacheError(f"{file}: there is no such file")
    _report(Cache.load(file), file, as_json=as_json, saved=False)


def check_output(output: Path, *, force: bool) -> None:
    """Find out before the work whether its result can be written."""
    if output.is_dir() or not output.absolute().parent.is_dir():
        what = "is a folder" if output.is_dir() else "its folder does not exist"
        raise CacheError(f"{output} cannot be written: {what}", instead="name a file in a folder that exists")
    if output.exists() and not force:
        raise CacheError(f"{output} exists", instead="name another file with --output, or pass --force")


def tensor_rows(cache: Cache) -> list[tuple[Cell, ...]]:
    """The rows of ``TENSORS``: one per point, its layers folded."""
    rows: list[tuple[Cell, ...]] = []
    for name, addresses in _by_point(cache).items():
        tensors = [cache[address] for address in addresses]
        layers = [address.layer for address in addresses if address.layer is not None]
        proof = _worst([cache.origin.proofs.get(format_address(a), "") for a in addresses])
        size = bytes_text(sum(tensor.nbytes for tensor in tensors))
        rows.append((name, spans_of(layers), _shapes(tensors), _dtype(tensors[0]), size, proof))
    return rows


def token_line(strings: Sequence[str], ids: Sequence[int]) -> Text:
    """Tokens with their positions, white space to be seen."""
    shown = [visible(token) for token in strings] or [f"#{i}" for i in ids]
    line = Text()
    for position, token in _middle_out(list(enumerate(shown))):
        if token is None:
            line.append(f"… {position} more …  ", "dim")
        else:
            line.append(f"{position} ", "dim").append(f"{token}  ")
    line.rstrip()
    return line


def load_line(file: Path, address: Address) -> str:
    """The shell line that prints one tensor of a saved capture."""
    code = f"from locant import Cache; print(Cache.load({str(file)!r})[{format_address(address)!r}])"
    plain = re.fullmatch(r"[A-Za-z0-9._~/-]+", str(file))
    return f'python -c "{code}"' if plain else f"python -c {shlex.quote(code)}"


def _report(cache: Cache, file: Path, *, as_json: bool, saved: bool = True) -> None:
    terminal = Terminal()
    if as_json:
        terminal.json(_about(cache, file), prompts=list(_prompt_records(cache)), tensors=list(_tensor_records(cache)))
        return
    origin = cache.origin
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    ran = [part for part in (running_line(origin.dtype, origin.attention), versions) if part]
    revision = f" at revision {origin.revision}" if origin.revision else ""
    terminal.line(Text.assemble((origin.model or "a model", "bold cyan"), revision))
    terminal.line("; ".join(ran))
    terminal.heading(f"{len(cache)} tensor{'s' * (len(cache) != 1)}, {bytes_text(cache.nbytes)}")
    terminal.table(TENSORS, tensor_rows(cache))
    _print_prompts(terminal, cache, file)
    terminal.heading(f"{'Saved ' if saved else ''}{file} ({bytes_text(file.stat().st_size)})")
    look = [("what it holds", f"locant show {shlex.quote(str(file))}")] if saved else []
    terminal.commands([*look, ("read a tensor", load_line(file, next(iter(cache))))])


def _lines(file: str | None) -> list[str]:
    """The prompts in a file, one per line."""
    if file is None:
        return []
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PromptError(f"{file} cannot be read: {reason}") from error
    lines = text.removesuffix("\n").split("\n")
    empty = next((n for n, line in enumerate(lines, 1) if not line.strip()), None)
    if empty is not None:
        raise PromptError(f"{file}: line {empty} is empty", has="one prompt per line", instead="delete that line")
    return [line.removesuffix("\r") for line in lines]


def _positions(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*-?[0-9]+\s*", part) for part in parts):
        raise PromptError(f"--positions {text}", has="positions are integers", instead="write for example 0,3,-1")
    return [int(part) for part in parts]


def _by_point(cache: Cache) -> dict[str, list[Address]]:
    grouped: dict[str, list[Address]] = {}
    for address in cache:
        grouped.setdefault(address.name, []).append(address)
    return grouped


def _worst(proofs: Sequence[str]) -> str:
    """One phrase for the proofs of several layers: their state and the largest error."""
    parsed = [_PROOF.fullmatch(proof) for proof in proofs]
    states = {match["state"] if match else proof for match, proof in zip(parsed, proofs, strict=True)}
    errors = [float(match["error"]) for match in parsed if match]
    worst = f", error {max(errors):.0e}".replace("0e+00", "0") if errors else ""
    return " or ".join(sorted(states)) + worst


def _shapes(tensors: Sequence[Tensor]) -> str:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    return "×".join(map(str, shapes.pop())) if len(shapes) == 1 else "differs"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _middle_out(items: list[tuple[int, str]]) -> Iterator[tuple[int, str | None]]:
    """All of a short list; of a long one both ends, and between them how many are left out."""
    if len(items) <= _SHOWN_TOKENS:
        yield from items
        return
    half = _SHOWN_TOKENS // 2
    yield from items[:half]
    yield len(items) - 2 * half, None
    yield from items[-half:]


def _print_prompts(terminal: Terminal, cache: Cache, file: Path) -> None:
    count = len(cache.tokens)
    terminal.heading(f"{count} prompt{'s' * (count != 1)}")
    columns = [Column("prompt", right=True), Column("tokens", right=True)]
    columns += [] if cache.positions is None else [Column("captured", wraps=True)]
    rows: list[tuple[Cell, ...]] = []
    for i, ids in enumerate(cache.tokens[:_SHOWN_PROMPTS]):
        strings = cache.origin.token_strings[i] if cache.origin.token_strings else ()
        kept = () if cache.positions is None else (", ".join(map(str, cache.positions[i])),)
        rows.append((str(i), str(len(ids)), *kept, token_line(strings, ids)))
    terminal.table([*columns, Column("text", wraps=True)], rows)
    if count > _SHOWN_PROMPTS:
        terminal.line(f"… and {count - _SHOWN_PROMPTS} more: locant show {shlex.quote(str(file))} --json")


def _about(cache: Cache, file: Path) -> dict[str, object]:
    origin = {k: v for k, v in asdict(cache.origin).items() if k not in ("proofs", "token_strings")}
    return {"file": str(file), **origin, "bytes": cache.nbytes}


def _prompt_records(cache: Cache) -> Iterator[Mapping[str, object]]:
    for i, ids in enumerate(cache.tokens):
        strings = list(cache.origin.token_strings[i]) if cache.origin.token_strings else None
        kept = None if cache.positions is None else list(cache.positions[i])
        yield {"tokens": list(ids), "strings": strings, "positions": kept}


def _tensor_records(cache: Cache) -> Iterator[Mapping[str, object]]:
    for address, tensor in cache.items():
        name = format_address(address)
        proof = cache.origin.proofs.get(name)
        yield {
            "address": name,
            "shape": list(tensor.shape),
            "dtype": _dtype(tensor),
            "bytes": tensor.nbytes,
            "proof": proof,
        }
