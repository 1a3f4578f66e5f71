"""Equations of the trunk and of the residual stream: how it begins, what is added to it, how it is unembedded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from locant.address import Address
from locant.anatomy.anatomy import Move
from locant.anatomy.evidence import Equation, Evidence
from locant.anatomy.identities.streams import lane_sum, merged, read_of_streams, stream_sum
from locant.anatomy.identities.table import identity
from locant.points import POINTS


@identity("embedding", "embeddings = W_E[tokens]")
def _embedding(e: Evidence) -> list[Equation]:
    if not e.has("embeddings"):
        return []
    return [e.equal(e.get("embeddings"), e.call("embedding", e.ids), "embeddings")]


@identity("final_norm", "final_norm = norm(resid_post.last), of several streams their merge", doubt_from=())
def _final_norm(e: Evidence) -> list[Equation]:
    trunk, block = e.at(None), e.at(e.last)
    name = "final_norm" if trunk.has("final_norm") else "lm_head"
    streams = trunk.plays("stream_head") or trunk.has("merged")
    if not trunk.has(name) or not block.has("resid_post") or not (streams or name == "final_norm"):
        return []
    last = block.get("resid_post")
    normed = trunk.call(name, merged(trunk, last) if streams else last)
    return [trunk.equal(trunk.get(name), normed, name, others=(block.address("resid_post"),))]


@identity("unembedding", "lm_head = W_U (scale · final_norm)", doubt_from=())
def _unembedding(e: Evidence) -> list[Equation]:
    scale = e.part.constants.get("unembedding_scale")
    if scale is None or not e.has("final_norm", "lm_head"):
        return []
    return [e.equal(e.get("lm_head"), e.call("lm_head", e.get("final_norm") * scale), "lm_head", "final_norm")]


@identity("logits", "logits = cap(scale · lm_head)", doubt_from=())
def _logits(e: Evidence) -> list[Equation]:
    if not e.has("lm_head", "logits"):
        return []
    return [e.equal(e.get("logits"), e.anatomy.shape_logits(e.get("lm_head")), "logits", "lm_head")]


@identity(
    "chain",
    "resid_pre[0] = embeddings (+ position embedding); resid_pre[l+1] = resid_post[l]; "
    "final_norm = norm(resid_post[last])",
    doubt_from=(),
)
def _chain(e: Evidence) -> list[Equation]:
    assert e.layer is not None
    found = []
    if e.layer == 0:
        found += _first_residual(e)
    elif not e.part.continues:
        found += _mid_sum(e) or _block_sum(e)
    else:
        before = e.at(e.layer - 1)
        link = (before.address("resid_post"),)
        found.append(e.equal(e.get("resid_pre"), before.get("resid_post"), "resid_pre", others=link))
    if e.layer == e.last:
        return found + _final_norm(e)
    after = e.at(e.layer + 1)
    if not after.part.continues:
        return found
    link = (after.address("resid_pre"),)
    return [*found, e.equal(after.get("resid_pre"), e.get("resid_post"), "resid_post", others=link)]


def _first_residual(e: Evidence) -> list[Equation]:
    entry, first = e.anatomy.entry, e.get("resid_pre")
    terms = [t for path in entry.summands if (t := e.output(path)) is not None]
    if not terms or len(terms) < len(entry.summands):
        return (_mid_sum(e) if e.part.lane is None else []) or _block_sum(
            e
        )  # it is what the block adds to, whatever it is made of
    if e.disturbed:
        return []
    if e.facts.n_streams > 1:
        terms = [t.unsqueeze(-2) for t in terms]
    total = torch.stack([t.expand_as(first) for t in terms]).sum(0) * entry.scale
    made = e.call_path(entry.norm, total) if entry.norm else total
    return [e.equal(first, made, "resid_pre", others=(Address("embeddings"),))]


@identity(
    "mid_sum", "resid_mid = resid_pre + attn_out_post; of several streams mix · resid_pre + write · attn_out_post"
)
def _mid_sum(e: Evidence) -> list[Equation]:
    if not e.has("resid_mid", "attn_out_post"):
        return []
    start = "resid_pre" if e.part.lane is None else "attn_stream_collapse"
    return _residual(e, "resid_mid", start, _ADDED[:1] if e.part.to_mid is None else e.part.to_mid)


@identity(
    "block_sum",
    "resid_post = resid_mid + mlp_out_post; in a parallel block resid_pre + attn_out_post + mlp_out_post; "
    "with the norm after the sum, norm(mlp_in + mlp_out_post); "
    "of several streams mix · resid_mid + write · mlp_out_post",
)
def _block_sum(e: Evidence) -> list[Equation]:
    start = "resid_mid" if e.has("resid_mid") else "resid_pre"
    moves = e.part.to_post
    if moves is None:
        moves = _ADDED[1:] if start == "resid_mid" else _ADDED
    if not e.has(*(m.name for m in moves if m.kind == "add" and m.name in POINTS)):
        return []
    return _residual(e, "resid_post", start, moves)


@identity(
    "stream_read",
    "stream_collapse = Σ read[k] · stream[k], over the streams as they enter or their norm",
    doubt_from=(),
)
def _stream_read(e: Evidence) -> list[Equation]:
    return read_of_streams(e)


_ADDED = (Move("add", "attn_out_post"), Move("add", "mlp_out_post"))


def _residual(e: Evidence, total: str, start: str, moves: Sequence[Move]) -> list[Equation]:
    """`total` is what `moves` make of `start`."""
    if e.part.lane is not None and total == "resid_post":
        equations = lane_sum(e, moves)
        return [*_for_raw(e, equations[0]), *equations[1:], *_streams_kept(e, total, equations[0])]
    if not any(m.kind in ("mix", "write") for m in moves):
        return _for_raw(e, e.follows(total, start, moves))
    equations = stream_sum(e, total, start, moves)
    return [*_for_raw(e, equations[0]), *equations[1:], *_streams_kept(e, total, equations[0])]


def _streams_kept(e: Evidence, total: str, equation: Equation) -> list[Equation]:
    """The stack as a whole is the same tensor as the residual after the block."""
    if total != "resid_post" or not e.has("resid_streams"):
        return []
    return [replace(equation, members=equation.members | {e.address("resid_streams")})]


def _for_raw(e: Evidence, equation: Equation) -> list[Equation]:
    """The equation, and again for each sublayer's raw output where that is what is added."""
    found = [equation]
    for sublayer in ("attn", "mlp"):
        raw, added = e.address(f"{sublayer}_out"), e.address(f"{sublayer}_out_post")
        if added in equation.members and e.has(raw.name):
            sites = e.part.sites[raw.name], e.part.sites[added.name]
            if sites[0] == replace(sites[1], view=replace(sites[1].view, scale=1.0)):
                found.append(replace(equation, members=frozenset([raw])))
    return found


def contribution(e: Evidence, sublayer: str) -> list[Equation]:
    """What `sublayer` (``attn`` or ``mlp``) adds follows from its output by its norm, its multiplier, its bias."""
    names = (f"{sublayer}_out_post", f"{sublayer}_out")
    if not e.has(*names):
        return []
    added = e.get(names[0])
    if names[0] in e.part.formulas:
        return [e.equal(added, e.computed(names[0]), *names)]
    normed = e.plays(f"{sublayer}_post_norm")
    value = e.call(f"{sublayer}_post_norm", e.get(names[1])) if normed else e.get(names[1])
    equation = e.equal(added, value * e.part.sites[names[0]].view.scale, *names)
    return [equation if normed else e.by_construction(equation)]
