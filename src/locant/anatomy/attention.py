"""Find a block's attention points: the softmax inside the mixer, and what flows into and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from locant.anatomy.anatomy import Gate
from locant.anatomy.formula import Formula, Named
from locant.anatomy.projection import find_projection, heads_before_repeat, moved_from
from locant.anatomy.residual import Flow, scaled
from locant.anatomy.sites import OpSite, Site, View
from locant.anatomy.structure import (
    CONTRACTIONS,
    DIFFERENCES,
    GATES,
    PRODUCTS,
    Scope,
    behind_norm,
    hidden_input,
    input_site,
    is_heavy,
    is_linear,
    mixes_tokens,
    op_site,
    output_site,
    rows,
)
from locant.anatomy.trace import Event, Value, same

FUSED = "scaled_dot_product_attention"


@dataclass(slots=True)
class Found:
    """The points one search found in a block, why others are absent, and what later searches need."""

    sites: dict[str, Site] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    module: Event | None = None
    raw: Event | None = None
    source: Value | None = None
    parts: list[Event] = field(default_factory=list)
    gate: Gate | None = None
    beside: dict[str, Site] = field(default_factory=dict)
    formulas: dict[str, Formula | Named] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Core:
    """The attention computation itself: ``softmax(query key) value``, fused or written out."""

    scores: Event
    mix: Event
    query: Value
    key: Value
    value: Value
    key_layout: str = "heads_first"

    @property
    def fused(self) -> bool:
        return self.scores is self.mix


_HEADS = (
    "query key q_norm_in q_norm_out k_norm_in k_norm_out query_rotated key_rotated value attn_scores attn_probs z "
    "attn_gate"
).split()
_OUTER = ["attn_in", "attn_out", "attn_out_post"]


def find_attention(scope: Scope, flow: Flow) -> Found:
    """The points of the block's token mixer; those inside it where it is softmax attention."""
    found = Found()
    cores = _cores(scope)
    if not cores:
        _other_mixer(flow, scope.children, found)
        return found
    core = cores[0]
    mixer = _around(scope, core)
    if mixer is None:
        return _without(found, "the attention of this block is in no module of its own")
    written = {id(step) for c in cores if (m := _around(scope, c)) and (step := flow.addition_of(m))}
    if len(written) > 1:
        found = _without(found, "this block adds to the residual from several attention sublayers, not one")
        found.facts["mixer"] = "several"
        return found
    if (writer := _writer_behind(scope, flow, mixer)) is not None:
        _other_mixer(flow, [writer], found)
        return found
    found.facts["mixer"] = "attention"
    handed = behind_norm(scope, mixer, core.scores)
    _input(flow, handed, found)
    found.module, found.parts = mixer, [mixer]
    _heads(scope, core, found)
    _projections(scope, mixer, handed, core, found)
    _output(scope, mixer, core, found)
    return found


def _around(scope: Scope, core: Core) -> Event | None:
    return next((e for e in scope.events if not e.is_op and e.index < core.scores.index < e.end), None)


def _without(found: Found, reason: str) -> Found:
    found.absent = dict.fromkeys([*_OUTER, *_HEADS], reason)
    found.facts = {"mixer": "other"}
    return found


def _writer_behind(scope: Scope, flow: Flow, mixer: Event) -> Event | None:
    """The token mixer that writes to the residual where attention does not, and only leads to what this one reads."""
    step = flow.addition_of(mixer)
    if step is None or step.side is None:
        return None
    later = (e for e in scope.calls if e.index > mixer.end and is_heavy(e) and same(e.output(), step.side))
    return next((e for e in later if mixes_tokens(e)), None)


def _input(flow: Flow, mixer: Event, found: Found) -> None:
    found.module = mixer
    found.parts = [mixer]
    found.sites["attn_in"] = input_site(mixer)
    taken = hidden_input(mixer)
    if taken is None:
        return
    found.source = taken[1]
    bare, factor = scaled(taken[1])
    if norm := flow.norm_before(taken[1]) or flow.norm_before(bare):
        found.modules["attn_norm"] = norm.name
        read = hidden_input(norm)
        found.source = read[1] if read is not None else None
        if factor != 1.0 and same(norm.output(), bare):
            found.constants["attn_in_scale"] = factor


def _other_mixer(flow: Flow, among: Sequence[Event], found: Found) -> None:
    """A token mixer without heads: the first of two sublayers, or the only one if it mixes tokens."""
    sublayers = [(e, step) for e in among if is_heavy(e) and (step := flow.addition_of(e)) is not None]
    several = any(step is not sublayers[0][1] for _, step in sublayers[1:])
    if not sublayers or not (several or mixes_tokens(sublayers[0][0])):
        found.facts = {"mixer": None}
        found.absent = dict.fromkeys([*_OUTER, *_HEADS], "no module of this block mixes tokens")
        return
    first, step = sublayers[0]
    last = [e for e, added in sublayers if added is step][-1]
    reason = "this block mixes tokens by other means than softmax attention, so it has no heads"
    found.absent = dict.fromkeys(_HEADS, reason)
    found.facts["mixer"] = "other"
    _input(flow, first, found)
    found.sites["attn_out"] = output_site(last)
    found.raw = last


def _cores(scope: Scope) -> list[Core]:
    """The attention computations of a block, the last one first."""
    found = list[Core]()
    for op in reversed(scope.events):
        if not op.is_op:
            continue
        if op.name == FUSED:
            query, key, value = (v for _, v in op.inputs[:3])
            found.append(Core(op, op, query, key, value))
        elif op.name == "softmax" and (core := _written_out(scope, op, scope.n_pos)):
            found.append(core)
    return found


def _written_out(scope: Scope, softmax: Event, n_pos: int) -> Core | None:
    """The core around `softmax`, if products of three tensors stand before and after it."""
    scores, probs = softmax.inputs[0][1], softmax.outputs[0][1]
    if scores.tensor.dim() < 3 or scores.shape[-2] != n_pos or scores.shape[-1] < n_pos:
        return None
    back = {id(v) for v in scope.trace.ancestors(scores, scope.run.index)}
    before = [
        e for e in scope.events if e.index < softmax.index and e.name in CONTRACTIONS and id(e.outputs[0][1]) in back
    ]
    after = (e for e in scope.events if e.index > softmax.index and e.is_op and e.name in CONTRACTIONS)
    mix = next((e for e in after if _descends(scope, e.inputs[0][1], probs, softmax)), None)
    if not before or mix is None:
        return None
    product = before[-1]
    operands = [v for _, v in product.inputs if v.tensor.dim() >= 3][-2:]
    if len(operands) < 2 or len(mix.inputs) < 2:
        return None
    return Core(softmax, mix, operands[0], operands[1], mix.inputs[1][1], "keys")


def _descends(scope: Scope, value: Value, origin: Value, since: Event) -> bool:
    return any(v is origin for v in scope.trace.ancestors(value, since.index - 1))


def _heads(scope: Scope, core: Core, found: Found) -> None:
    """What the attention computation itself reads and makes, and the numbers of heads."""
    n_heads, n_kv = core.query.shape[-3], heads_before_repeat(core.value)
    found.facts |= {"n_heads": n_heads, "n_kv_heads": n_kv, "head_dim": core.value.shape[-1]}

    def argument(op: Event, slot: Any, view: View) -> OpSite:
        return replace(op_site(scope, op, view), slot=slot)

    matrix = View("matrix", n_heads=n_heads)
    if core.fused:
        product, arguments = core.scores, tuple(slot for slot, _ in core.scores.inputs[:2])
        found.sites["attn_scores"] = argument(core.scores, "scores", matrix)
        found.sites["attn_probs"] = argument(core.scores, "probs", matrix)
    else:
        product = next(
            e for e in scope.events if e.is_op and any(v is core.key for _, v in e.inputs) and e.name in CONTRACTIONS
        )
        arguments = tuple(s for s, v in product.inputs if v is core.query or v is core.key)
        n_pos = scope.n_pos
        for point, op in (("attn_scores", core.scores), ("attn_probs", core.mix)):
            sinks = op.inputs[0][1].shape[-1] - n_pos
            found.sites[point] = argument(op, 0, replace(matrix, sinks=sinks))
        if (cap := _cap(scope, product, core.scores)) is not None:
            found.constants["score_cap"] = cap
        if any(e.is_op and e.name in DIFFERENCES and product.index < e.index < core.scores.index for e in scope.events):
            found.constants["score_shift"] = 1.0
    found.sites["query_rotated"] = argument(product, arguments[0], View("heads_first", n_heads=n_heads))
    found.sites["key_rotated"] = argument(product, arguments[1], View(core.key_layout, n_heads=n_kv))  # type: ignore[arg-type]
    found.sites["value"] = argument(
        core.mix, core.mix.inputs[2 if core.fused else 1][0], View("heads_first", n_heads=n_kv)
    )


def _cap(scope: Scope, product: Event, softmax: Event) -> float | None:
    """The number the scores are divided by before a tanh."""
    between = [e for e in scope.events if e.is_op and product.index < e.index < softmax.index]
    for op in between:
        if op.name == "tanh":
            before = op.inputs[0][1].producer
            return float(before.scalars[0]) if before is not None and before.scalars else None
    return None


def _projections(scope: Scope, mixer: Event, entered: Event, core: Core, found: Found) -> None:
    """The query, key and value as projected, and the norms between projection and attention."""
    trace = scope.trace
    back = {
        "query": trace.ancestors(core.query, mixer.index),
        "key": trace.ancestors(core.key, mixer.index),
        "value": trace.ancestors(core.value, mixer.index),
    }
    linears = [e for e in scope.events if mixer.index < e.index < core.scores.index and is_linear(e)]
    n_pos = scope.n_pos
    for name, own in back.items():
        others = {id(v) for other, values in back.items() if other != name for v in values}
        only = [core.value] if name == "value" else [v for v in own if id(v) not in others]
        whole = {"query": core.query, "key": core.key, "value": core.value}[name].tensor.numel()
        only = [v for v in only if v.tensor.numel() <= whole]  # more than that holds an output gate too
        projection = find_projection(only, own, linears, n_pos)
        if projection is not None:
            event, channels = projection
            found.sites[name] = output_site(event, replace(rows(event.outputs[0][1]), channels=channels))
            handed, taken = hidden_input(entered), hidden_input(event)
            if handed is not None and taken is not None and same(handed[1], taken[1]):
                found.modules[f"w_{name[0]}"] = event.name
    norms = [e for e in scope.norms if mixer.index < e.index < core.scores.index]
    outputs = {id(e.output()) for e in linears}
    for name, short in (("query", "q"), ("key", "k")):
        reach = {id(v) for v in back[name]} - {id(v) for other, vs in back.items() if other != name for v in vs}
        late = [e.index for e in linears if id(e.output()) in {id(v) for v in back[name]}]
        norm = next((e for e in norms if id(e.output()) in reach and e.index > max(late, default=0)), None)
        if norm is not None:
            layout = _head_layout(norm.output(), n_pos)
            found.sites[f"{short}_norm_in"] = input_site(norm, View(layout))
            found.sites[f"{short}_norm_out"] = output_site(norm, View(layout))
            found.modules[f"{short}_norm"] = norm.name
            taken = hidden_input(norm)
            if taken is not None and not any(id(v) in outputs for v in moved_from(taken[1])):
                found.constants[f"{short}_norm_late"] = 1.0
        clip = next((c for v in back[name] if (c := _clip(v.producer)) is not None), None)
        if clip is not None:
            found.constants[f"{name}_clip"] = clip
    found.facts["qk_norm"] = "q_norm" in found.modules
    for point in ("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"):
        if point not in found.sites:
            found.absent[point] = "the query and key of this block pass through no norm"
    for name in ("query", "key"):
        if name not in found.sites:
            found.absent[name] = f"no single projection holds the {name} before its position encoding"


def _clip(made: Event | None) -> float | None:
    """The bound of a symmetric clamp."""
    if made is None or made.name not in ("clamp", "clamp_", "clip", "clip_"):
        return None
    bounds = {abs(x) for x in made.scalars}
    return bounds.pop() if len(bounds) == 1 else None


def _head_layout(value: Value | None, n_pos: int) -> Any:
    if value is None or value.tensor.dim() < 4:
        return "tokens"
    return "heads" if value.shape[1] == n_pos else "heads_first"


def _output(scope: Scope, mixer: Event, core: Core, found: Found) -> None:
    linears = [e for e in scope.events if core.mix.index < e.index < mixer.end and is_linear(e)]
    given = mixer.output()
    used = {id(v) for v in scope.trace.ancestors(given, mixer.index)} if given is not None else set[int]()
    linears = [e for e in linears if id(e.output()) in used] or linears
    if not linears:
        reason = "no output projection follows the attention"
        found.absent |= dict.fromkeys(["z", "attn_out", "attn_out_post"], reason)
        return
    w_o: Event = linears[-1]
    found.modules["w_o"] = w_o.name
    found.sites["z"] = input_site(w_o)
    found.sites["attn_out"] = output_site(w_o)
    found.raw = w_o
    _gate(scope, mixer, core, w_o, found)


def _gate(scope: Scope, mixer: Event, core: Core, w_o: Event, found: Found) -> None:
    """The projection whose function the attention output is multiplied by on its way to `w_o`."""
    found.absent["attn_gate"] = "the attention output of this block is not gated"
    taken = hidden_input(w_o)
    if taken is not None and (norm := scope.norm_giving(taken[1])) is not None and norm.index > core.mix.index:
        found.modules["z_norm"] = norm.name
        taken = hidden_input(norm)
    product = moved_from(taken[1])[-1].producer if taken is not None else None
    if product is None or product.name not in PRODUCTS or len(product.inputs) != 2:
        return
    mixed = core.mix.outputs[0][1]
    plain = [v for _, v in product.inputs if not _descends(scope, v, mixed, core.mix)]
    function = moved_from(plain[0])[-1].producer if len(plain) == 1 else None
    if function is None:
        return
    if function.name not in GATES or not function.inputs:
        _factor(scope, plain[0], found)
        return
    linears = [e for e in scope.events if mixer.index < e.index < w_o.index and is_linear(e)]
    argument = function.inputs[0][1]
    source = find_projection([argument], scope.trace.ancestors(argument, mixer.index), linears, scope.n_pos)
    if source is None:
        found.absent["attn_gate"] = "no single projection holds the gate of this block's attention output"
        _factor(scope, plain[0], found)
        return
    event, channels = source
    del found.absent["attn_gate"]
    found.sites["attn_gate"] = output_site(event)
    found.gate = Gate(function.name, channels)


def _factor(scope: Scope, factor: Value, found: Found) -> None:
    """What the attention output is multiplied by, where that is no function of one projection."""
    made = factor.producer
    if made is not None:
        found.beside["z_factor"] = op_site(scope, made, View("raw"), factor.overwritten)
