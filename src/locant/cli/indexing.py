"""``locant index``: the rows a locator in a config file resolves to, on the sizes of a model that is not loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from locant.address import format_address
from locant.anatomy.facts import Facts
from locant.cli.listing import facts_line
from locant.cli.terminal import Column, Terminal
from locant.errors import LocatorError, ModelError
from locant.locators.index import Index
from locant.locators.locator import ModelLocatorConfig

Side = Literal["source", "target"]


def run(config: str, facts: str, tokens: str | None, shown: int, output: Path | None, *, as_json: bool) -> None:
    """Resolve every locator of a config, a file or the YAML itself in braces, and print its rows.

    Raises:
        LocatorError: it holds no locator, or one that names no rows of this model.
        ModelError: the sizes of the model are not to be had.
    """
    locators = _locators(config)
    if output is not None and len(locators) > 1:
        raise LocatorError(f"{output}: {config} has a source and a target", instead="write them without --output")
    n_positions = _tokens(tokens)
    sizes, source = read_facts(facts)
    made = [Index(locator, locator.parse(sizes, n_positions), side) for side, locator in locators.items()]
    terminal = Terminal()
    if as_json:
        rows = {index.side: list(index) for index in made}
        terminal.json({"facts": sizes.to_dict(), "tokens": n_positions}, **cast("dict[str, Any]", rows))
    else:
        terminal.line(f"{source}: {facts_line(sizes)}")
        for index in made:
            _print(terminal, index, shown)
    if output is not None:
        made[0].write_csv(output)
        if not as_json:
            terminal.line(f"\nSaved {output}")


def read_facts(source: str) -> tuple[Facts, str]:
    """The sizes of a model, from a file of them or from the model's config, and where they are from.

    Args:
        source: a JSON file of facts or of a config, a folder, a .gguf file, the embedded model, a hub id, or, where the
            hub does not answer, a type of transformers' models, which stands for the defaults of its config.

    Raises:
        ModelError: it is none of these.
    """
    path = Path(source).expanduser()
    if path.suffix != ".json":
        return _of_config(*_config(source))
    try:
        read: object = json.loads(path.read_text(encoding="utf-8"))
        sizes = cast("Mapping[str, Any]", read)
        if "model_type" in sizes:
            return _of_config(*_config(source))
        return Facts.from_dict(cast("Mapping[str, Any]", sizes.get("facts", sizes))), source
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(
            f"{source}: no facts of a model: {error}",
            has='facts are sizes, e.g. {"n_layers": 12, "n_heads": 12, "d_model": 768}',
            instead="name a model, or write its sizes",
        ) from error


def _config(source: str) -> tuple[Any, str]:
    from transformers import CONFIG_MAPPING, AutoConfig

    from locant.load import locate

    place, file = locate(source)
    try:
        return AutoConfig.from_pretrained(place, **({"gguf_file": file} if file else {})), source
    except (OSError, ValueError) as error:
        if source in CONFIG_MAPPING:
            default = CONFIG_MAPPING[source]()
            return default, f"the defaults of {type(default).__name__}"
        raise ModelError(
            f"{source}: its config cannot be read: {str(error).strip().splitlines()[0]}",
            instead="name a hub id, a folder, a .gguf file, a JSON file of facts, or a model type such as gpt2",
        ) from error


def _of_config(config: Any, source: str) -> tuple[Facts, str]:
    """The sizes a config states, under the names that the configs of transformers share."""
    text = config.get_text_config()

    def size(*names: str) -> int | None:
        stated = (getattr(text, name, None) for name in names)
        return next((n for n in stated if isinstance(n, int) and n), None)

    d_model, n_heads = size("hidden_size"), size("num_attention_heads")
    d_mlp = size("intermediate_size", "n_inner")
    if d_mlp is None and hasattr(text, "n_inner") and d_model:
        d_mlp = 4 * d_model  # what such a config says of itself when it leaves n_inner out
    sizes = {
        "n_layers": size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": size("num_key_value_heads") if hasattr(text, "num_key_value_heads") else n_heads,
        "head_dim": size("head_dim") or (d_model // n_heads if d_model and n_heads else None),
        "d_mlp": d_mlp,
        "vocab_size": size("vocab_size"),
        "n_ctx": size("max_position_embeddings"),
        "n_experts": size("num_local_experts", "num_experts", "n_routed_experts"),
        "experts_per_token": size("num_experts_per_tok"),
    }
    if sizes["n_layers"] is None:
        raise ModelError(f"{source}: its config states no number of layers", instead="write a JSON file of facts")
    return Facts(**cast("dict[str, Any]", sizes)), source


def _locators(config: str) -> dict[Side, ModelLocatorConfig]:
    """The locator a config holds, or those under its ``source`` and ``target``."""
    inline = config.lstrip().startswith("{")
    path = "the locator" if inline else config
    try:
        held: object = yaml.load(config if inline else Path(config).read_text(encoding="utf-8"), _Strict)  # noqa: S506
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LocatorError(f"{path} cannot be read: {' '.join(str(error).split())}", "it is YAML or JSON") from error
    sides: tuple[Side, ...] = ("source", "target")
    named = [side for side in sides if isinstance(held, Mapping) and side in held]
    parts = {side: cast("Mapping[str, Any]", held)[side] for side in named} if named else {"source": held}
    found: dict[Side, ModelLocatorConfig] = {}
    for side, part in parts.items():
        try:
            found[cast("Side", side)] = ModelLocatorConfig.from_config(cast("Mapping[str, object]", part))
        except LocatorError as error:
            where = f"{path}, {side}" if named else path
            raise LocatorError(f"{where}: {error.asked}", error.has, error.instead) from error
    return found


class _Strict(yaml.SafeLoader):
    """Plain YAML in which no key of a mapping stands twice; the first one would silently count for nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stands twice in one mapping", node.start_mark)
        return super().construct_mapping(node, deep)


def _tokens(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise LocatorError(f"--tokens {text!r}", "a token count, or several with commas: 6 or 6,9") from error
    return counts[0] if len(counts) == 1 else counts


def _print(terminal: Terminal, index: Index, shown: int) -> None:
    count, tensors = len(index), len(index.addresses)
    reads = [format_address(address) for address in index.addresses[:3]]
    more = ", …" if tensors > len(reads) else ""
    note = f"They read {tensors} tensor{'s' * (tensors != 1)}: {', '.join(reads)}{more}." if count else ""
    terminal.heading(f"{index.side.capitalize()}: {count:,} row{'s' * (count != 1)}", note)
    columns = [Column(name, right=not name.endswith("_activation"), wraps=True) for name in index.columns]
    rows: Sequence[Mapping[str, object]] = index[: shown or None]
    if rows:
        terminal.table(columns, [[str(cell) for cell in row.values()] for row in rows])
    if len(rows) < count:
        terminal.line(f"\n… and {count - len(rows):,} more: --rows 0 prints them all, --output FILE saves them")
