"""``locant points``: what one model serves, where and how sure, and what it does not, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from locant.address import format_address
from locant.cli.terminal import Column, Terminal, error_text
from locant.engine.plan import PointStatus
from locant.engine.served import PointRow, Served
from locant.errors import LayerOutOfRange
from locant.points import POINTS, PROMPT_AXES

if TYPE_CHECKING:
    from locant.anatomy.facts import Facts
    from locant.cli.model import Source
    from locant.engine.eager.model import EagerModel

_SERVED = (
    Column("point"),
    Column("layers"),
    Column("width", right=True),
    Column("error", right=True),
    Column("read at", style="dim", wraps=True),
)
_REFUSED = (
    Column("point"),
    Column("layers"),
    Column("proof", style="red"),
    Column("error", right=True),
    Column("why not, and what instead", wraps=True),
)
_ABSENT = tuple(column for column in _REFUSED if column.header not in ("proof", "error"))
_ELSE = 46  # what the columns before "read at" take


def run(source: Source, layer: int | None, *, served: bool, refused: bool, as_json: bool) -> None:
    """Load the model and list its points.

    Raises:
        LayerOutOfRange: the model has no such layer.
    """
    model = source.load()
    statuses = _of_layer(model, layer)
    wanted = [status for status in statuses if (served if status.served else refused)]
    terminal = Terminal()
    if as_json:
        terminal.json(_about(model), points=[_record(status) for status in wanted])
    else:
        count = sum(status.served for status in statuses)
        where = "" if layer is None else f" of layer {layer}"
        told = f", {count} of the {len(statuses)} addresses{where} served"
        terminal.line(Text.assemble((model.name, "bold cyan"), told))
        terminal.line(facts_line(model.facts))
        terminal.line(how_it_runs(model))
        _print(terminal, model, Served(model.name, model.facts, wanted).rows())


def facts_line(facts: Facts) -> str:
    """The sizes of a model in one line."""
    heads = f"{facts.n_heads} heads of {facts.head_dim}" if facts.n_heads and facts.head_dim else ""
    if heads and facts.n_kv_heads != facts.n_heads:
        heads += f" ({facts.n_kv_heads} for keys)"
    parts = [f"{facts.n_layers} layers", f"{facts.d_model} wide", heads]
    parts += [f"{facts.d_mlp} neurons" if facts.d_mlp else ""]
    parts += [f"{facts.n_experts} experts" if facts.n_experts else ""]
    parts += [f"{facts.vocab_size} tokens" if facts.vocab_size else ""]
    return ", ".join(part for part in parts if part)


def how_it_runs(model: EagerModel) -> str:
    """In what precision, by which attention and where a model runs."""
    return running_line(_dtype(model), model.anatomy.attention) + f", on {model.hf.device}"


def running_line(dtype: str, attention: str | None) -> str:
    """In what precision and by which attention a model ran."""
    return f"{dtype}, {attention} attention" if attention else dtype


def _of_layer(model: EagerModel, layer: int | None) -> list[PointStatus]:
    statuses = list(model.points())
    if layer is None:
        return statuses
    if layer >= model.facts.n_layers:
        raise LayerOutOfRange(
            f"layer {layer}", has=f"{model.name} has {model.facts.n_layers} layers, 0 to {model.facts.n_layers - 1}"
        )
    return [status for status in statuses if status.address.layer == layer]


def _about(model: EagerModel) -> dict[str, object]:
    return {
        "model": model.name,
        "revision": model.revision,
        "dtype": _dtype(model),
        "attention": model.anatomy.attention,
        "facts": model.facts.to_dict(),
    }


def _record(status: PointStatus) -> dict[str, object]:
    error = status.error
    return {
        "address": format_address(status.address),
        "point": status.address.name,
        "layer": status.address.layer,
        "served": status.served,
        "width": status.width,
        "proof": status.proof,
        "error": error if error is not None and math.isfinite(error) else None,
        "how": status.how,
        "reason": status.reason,
        "instead": status.instead,
    }


def _dtype(model: EagerModel) -> str:
    return str(model.hf.dtype).removeprefix("torch.")


def _print(terminal: Terminal, model: EagerModel, rows: Sequence[PointRow]) -> None:
    served = [row for row in rows if row.served]
    absent = [row for row in rows if row.proof == "not applicable"]
    refused = [row for row in rows if not row.served and row.proof != "not applicable"]
    if served:
        _print_served(terminal, model, served)
    if refused:
        terminal.heading(f"Refused: {_counted(refused)}", "Found, but the proof fails or proves nothing here.")
        terminal.table(_REFUSED, [(r.name, r.layers, r.proof, error_text(r.error), _why(r)) for r in refused])
    if absent:
        terminal.heading(f"Absent: {_counted(absent)}", "This structure has no such tensor.")
        terminal.table(_ABSENT, [(row.name, row.layers, _why(row)) for row in absent])


def _print_served(terminal: Terminal, model: EagerModel, rows: Sequence[PointRow]) -> None:
    terminal.heading(
        f"Served and proven: {_counted(rows)}",
        "Found by structure, and right by algebra on the loaded weights, with this error.",
    )
    places = [row.how if not row.how.startswith(".") else f"the model{row.how}" for row in rows]
    block = _block_prefix(model)
    if block and terminal.styled and terminal.console.width < _ELSE + max(map(len, places)):
        inside = re.compile(re.escape(block).replace(r"\*", r"(\*|\d+)"))
        places = [inside.sub("…", place, count=1) if inside.match(place) else place for place in places]
        terminal.line(Text(f"… is {block}", "dim"))
    sizes = [(row.name, row.layers, _width(row, model.facts), _proof(row)) for row in rows]
    terminal.table(_SERVED, [(*size, place) for size, place in zip(sizes, places, strict=True)])


def _proof(row: PointRow) -> str:
    return error_text(row.error) if row.proof == "proven" else row.proof


def _why(row: PointRow) -> Text:
    return Text.assemble(row.reason, (f"; {row.instead}" if row.instead else "", "dim"))


def _counted(rows: Sequence[PointRow]) -> str:
    count = len({row.name for row in rows})
    return f"{count} point{'s' * (count != 1)}"


def _width(row: PointRow, facts: Facts) -> str:
    """The width in numbers as far as the model decides it."""
    factors = POINTS[row.name].width
    sizes = [factor if factor in PROMPT_AXES else getattr(facts, factor, None) for factor in factors]
    if not PROMPT_AXES.intersection(factors) or None in sizes:
        return row.width
    return "×".join(map(str, sizes))


def _block_prefix(model: EagerModel) -> str | None:
    """How the path of every block starts, its number as ``*``: ``model.layers.*.``; None if they differ."""
    paths = [block.path.split(".") for block in model.anatomy.blocks]
    starred = {".".join("*" if part.isdigit() else part for part in path) for path in paths}
    return f"{starred.pop()}." if len(starred) == 1 else None
