"""``locant demo``: load a real model, read named places of it, and show what is there."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from rich.text import Text
from torch import Tensor

from locant import __version__
from locant.cli.capturing import TENSORS, check_output, load_line, tensor_rows, token_line
from locant.cli.listing import facts_line, how_it_runs
from locant.cli.model import Source
from locant.cli.terminal import Column, Terminal, Tile, error_text, visible
from locant.engine.cache import Cache, bytes_text
from locant.load import EMBEDDED
from locant.points import POINTS

if TYPE_CHECKING:
    from locant.engine.eager.model import EagerModel

PROMPT = "The capital of France is"
_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉"


def run(output: Path) -> None:
    """Load, capture, show and save.

    Raises:
        LocantError: the model is not installed, or the file cannot be written.
    """
    check_output(output, force=True)
    terminal = Terminal()
    start = time.perf_counter()
    model = Source(EMBEDDED).load()
    seconds = time.perf_counter() - start
    last = model.facts.n_layers - 1
    layers = range(model.facts.n_layers)
    addresses = [
        "embeddings",
        *(f"resid_post.{layer}" for layer in layers),
        *(f"attn_probs.{layer}" for layer in layers),
        f"mlp_act.{last}",
        "logits",
    ]
    cache = model.capture(PROMPT, addresses)
    cache.save(output)
    tokens = [visible(token) for token in cache.origin.token_strings[0]]
    shown = sorted({*range(0, last, 3), last}, reverse=True)

    _introduce(terminal, model, seconds)
    terminal.heading("What was read", "One forward pass of this prompt:")
    terminal.line(token_line(cache.origin.token_strings[0], cache.tokens[0]))
    terminal.table(TENSORS, tensor_rows(cache))
    terminal.line(_comparison(model, cache))
    _residuals(terminal, cache, tokens, shown)
    _lens(terminal, model, cache, tokens, shown)
    _attention(terminal, cache, tokens)
    terminal.heading(f"Saved {output} ({bytes_text(output.stat().st_size)})")
    _goodbye(terminal, cache, output)


def _introduce(terminal: Terminal, model: EagerModel, seconds: float) -> None:
    served = [row for row in model.points().rows() if row.served]
    worst = max(row.error or 0.0 for row in served)
    absent = len(POINTS) - len({row.name for row in served})
    terminal.line(
        Text.assemble(f"locant {__version__}  ", (model.name, "bold cyan"), f", loaded and proven in {seconds:.0f} s")
    )
    terminal.line(f"{facts_line(model.facts)}")
    terminal.line(how_it_runs(model))
    terminal.heading(
        f"{len(served)} of {len(POINTS)} points found and proven",
        "Found by the model's structure, then proven by algebra on the loaded weights.",
    )
    terminal.line(f"The largest error of any proof here is {error_text(worst)}, relative to the row it is in.")
    terminal.line(f"This model has no such tensor for the other {absent}, and locant says so:")
    terminal.quote(str(model.refuses("q_norm_out.10")), "red")


@torch.inference_mode()
def _comparison(model: EagerModel, cache: Cache) -> str:
    own = model.hf(input_ids=torch.tensor(cache.tokens), use_cache=False).logits
    alike = "bit for bit" if torch.equal(own, cache["logits"]) else "not (please report this)"
    return f"These logits are {alike} those that the model gives without locant."


def _residuals(terminal: Terminal, cache: Cache, tokens: Sequence[str], shown: Sequence[int]) -> None:
    terminal.heading(
        "resid_post: how long the residual is",
        "Its norm after a layer. The first token's is huge: idle heads look there.",
    )
    norms = {layer: cache["resid_post", layer][0].float().norm(dim=-1) for layer in shown}
    logs = torch.stack([norms[layer] for layer in shown]).log()
    weights = (logs - logs.min()) / (logs.max() - logs.min())
    rows = [
        (str(layer), [Tile(f"{float(n):,.0f}", float(w)) for n, w in zip(norms[layer], row, strict=True)])
        for layer, row in zip(shown, weights, strict=True)
    ]
    terminal.grid("layer", tokens, rows)


def _lens(terminal: Terminal, model: EagerModel, cache: Cache, tokens: Sequence[str], shown: Sequence[int]) -> None:
    terminal.heading(
        "resid_post, unembedded: what the model would say next",
        "The likeliest next token if the model stopped there, and its probability.",
    )
    rows = []
    for layer in shown:
        likeliest = _probabilities(model, cache["resid_post", layer][0]).max(-1)
        words = [visible(model.tokenizer.decode([int(i)])) for i in likeliest.indices]  # type: ignore[union-attr]
        shares = [float(p) for p in likeliest.values]
        tiles = [Tile(f"{share:.2f}", share, word) for word, share in zip(words, shares, strict=True)]
        rows.append((str(layer), tiles))
    terminal.grid("layer", tokens, rows)


@torch.inference_mode()
def _probabilities(model: EagerModel, residual: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos vocab"]:
    return model.unembed(residual).float().softmax(-1)


def _attention(terminal: Terminal, cache: Cache, tokens: Sequence[str]) -> None:
    layers = [address.layer for address in cache if address.name == "attn_probs"]
    looks = torch.stack([cache["attn_probs", layer][0, :, -1].float() for layer in layers])
    layer, head = divmod(int(looks[..., -2].argmax()), looks.shape[1])
    terminal.heading(
        f"attn_probs.{layer}, head {head}: where the last token looks",
        f"Of {looks.shape[0] * looks.shape[1]} heads, this one takes the most from {tokens[-2]}.",
    )
    columns = (Column("token"), Column("taken", right=True), Column("", style="blue"))
    rows = [
        (f"{i} {token}", f"{float(p):.2f}", _bar(float(p)))
        for i, (token, p) in enumerate(zip(tokens, looks[layer, head], strict=True))
    ]
    terminal.table(columns, rows)


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _goodbye(terminal: Terminal, cache: Cache, output: Path) -> None:
    file = shlex.quote(str(output))
    terminal.commands(
        [
            ("what the file holds", f"locant show {file}"),
            ("read a tensor from it", load_line(output, next(iter(cache)))),
            ("every point of this model, and where it is read", "locant points"),
            (
                "other places and other words; a model's name before -a for another model",
                "locant capture -a z.5 -a attn_probs.5 -p 'Hello world' -o hello.safetensors",
            ),
        ]
    )
