"""Find the points of a model by its structure: one traced forward of a few tokens, no architecture names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.anatomy.anatomy import Anatomy, Entry, Part
from locant.anatomy.attention import find_attention
from locant.anatomy.channel import find_channel_mixer
from locant.anatomy.contributions import find_contributions
from locant.anatomy.facts import Facts, LayerFacts, common
from locant.anatomy.lane import find_lane, find_lane_streams
from locant.anatomy.residual import Flow
from locant.anatomy.sites import ModuleSite, Site, View
from locant.anatomy.streams import Streams, find_streams, name_moves, stack_view, stream_outlets
from locant.anatomy.structure import (
    CALL_ERRORS,
    PRODUCTS,
    QUOTIENTS,
    Scope,
    hidden_input,
    input_site,
    is_linear,
    output_site,
)
from locant.anatomy.trace import Event, Trace, Value, same
from locant.errors import ModelError
from locant.points import POINTS


def survey(model: PreTrainedModel) -> Anatomy:
    """Trace one forward of a few tokens and find every point in it.

    Raises:
        ModelError: the model has no stack of blocks over a residual stream that this can recognise.
    """
    if attention_in_use(model) == "flex_attention":
        raise ModelError(
            f"{type(model).__name__} runs with flex_attention, which compiles what it computes",
            instead="model.set_attn_implementation('sdpa') or 'eager'",
        )
    ids = probe_ids(model, 1)
    trace = Trace(model, ids.numel())
    try:
        trace.record(lambda: model(input_ids=ids, use_cache=False))
    except CALL_ERRORS as error:
        raise ModelError(
            f"{type(model).__name__} does not run on token ids alone: {error}",
            instead="load a decoder-only language model (AutoModelForCausalLM)",
        ) from error
    runs = block_runs(trace, model)
    if not runs:
        raise ModelError(
            asked=f"the structure of {type(model).__name__}",
            has="no list of blocks that each take and return a residual stream [batch, pos, d_model]",
            instead="load a decoder-only language model (AutoModelForCausalLM)",
        )
    _check_tokens(model, runs, ids.shape[-1])
    last = runs[-1].output()
    if last is None or not bool(torch.isfinite(last.data).all()):
        raise ModelError(
            f"{type(model).__name__}: its forward gives numbers that are not finite",
            instead="check its weights for NaN, and its dtype for overflow",
        )
    table = next((e for e in trace.calls(trace.events) if _reads_ids(e, ids)), None)
    given = table.output() if table is not None else None
    stack = stack_view(trace, runs, ids.shape, None if given is None else given.shape[-1])
    continues = [i == 0 or _continues(runs[i - 1], run) for i, run in enumerate(runs)]
    found = [_block(trace, run, stack, continuing) for run, continuing in zip(runs, continues, strict=True)]
    trunk, entry, trunk_sizes = _trunk(trace, model, runs, ids, stack)
    layers = tuple(layer for _, layer in found)
    sizes: dict[str, Any] = trunk_sizes | common(layers)
    facts = Facts(n_layers=len(runs), layers=layers, **sizes)
    return Anatomy(
        facts,
        trunk,
        tuple(part for part, _ in found),
        attention_in_use(model),
        entry,
        _outputs(trace, ids.shape[-1]),
        _logit_ops(trace, trunk.modules.get("lm_head")),
    )


def attention_in_use(model: PreTrainedModel) -> str | None:
    """The attention implementation the model runs with now."""
    return getattr(model.config.get_text_config(), "_attn_implementation", None)


def probe_ids(model: PreTrainedModel, batch: int, length: int | None = None) -> Tensor:
    """A few different tokens; a length no size in the config shares, so that axes cannot be confused."""
    config = model.config.get_text_config()
    vocabulary = int(getattr(config, "vocab_size", 0) or 0) or embedding_weight(model).shape[0]
    sizes = {v for v in config.to_dict().values() if isinstance(v, int)}
    length = length or next((n for n in (7, 11, 13, 5) if n not in sizes), 7)
    first, last = vocabulary // 10, max(vocabulary - vocabulary // 10, vocabulary // 10 + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(first, last, (batch, length), generator=generator)
    return ids.to(input_device(model))


def embedding_weight(model: PreTrainedModel) -> Tensor:
    """``[vocab, d]`` of the token embedding."""
    weight = getattr(_embedding(model), "weight", None)
    if not isinstance(weight, Tensor):
        raise ModelError(
            f"{type(model).__name__} has no single table of token embeddings",
            instead="load a language model that reads one sequence of token ids",
        )
    return weight


def _embedding(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # transformers knows it by its name only
        return next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go, on a model that is spread over devices or offloaded too."""
    embedding = _embedding(model)
    hook = getattr(embedding, "_hf_hook", None)
    place: str | int | torch.device | None = getattr(hook, "execution_device", None)
    return embedding_weight(model).device if place is None else torch.device(place)


def block_runs(trace: Trace, model: nn.Module) -> list[Event]:
    """Calls of the elements of the outermost module lists that map a residual stream to itself."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [p for p in lists if not any(p.startswith(f"{q}.") for q in lists)]
    elements = {f"{path}.{name}" for path in outermost for name, _ in model.get_submodule(path).named_children()}
    return [e for e in trace.calls(trace.events) if e.name in elements and _keeps_residual(e)]


def _keeps_residual(event: Event) -> bool:
    taken, given = hidden_input(event), event.output()
    heavy = event.module is not None and any(p.dim() >= 2 for p in event.module.parameters())
    return heavy and not is_linear(event) and taken is not None and given is not None and taken[1].shape == given.shape


def _check_tokens(model: PreTrainedModel, runs: Sequence[Event], n_pos: int) -> None:
    shapes = [taken[1].shape for run in runs if (taken := hidden_input(run)) is not None]
    if any(n_pos not in shape[:-1] or shape[-1] != shapes[-1][-1] for shape in shapes):
        raise ModelError(
            asked=f"the structure of {type(model).__name__}",
            has="blocks over positions that are not its tokens, or residuals of different widths",
            instead="load a model with one residual stream over its tokens",
        )


def _continues(before: Event, run: Event) -> bool:
    """A block is handed just what the last one returned."""
    given, taken = before.output(), hidden_input(run)
    return given is not None and taken is not None and torch.equal(given.data, taken[1].data)


def _block(trace: Trace, run: Event, stack: View | None, continues: bool) -> tuple[Part, LayerFacts]:
    scope = Scope(trace, run, stack)
    view = stack or View()
    slot, entering = scope.residual
    out = next((s, v) for s, v in run.outputs if v is run.output())
    sites: dict[str, Site] = {
        "resid_pre": ModuleSite(run.name, "input", slot, run.call, view, entering.overwritten),
        "resid_post": ModuleSite(run.name, "output", out[0], run.call, view, out[1].overwritten),
    }
    flow = Flow(scope)
    lane = find_lane(scope, flow) if stack is not None else None
    inner, way = (lane.scope, lane.flow) if lane is not None else (scope, flow)
    attention = find_attention(inner, way)
    channel = find_channel_mixer(inner, way, attention)
    streams = Streams()
    if lane is not None:
        norm = attention.modules.get("attn_norm")
        streams = find_lane_streams(scope, lane, next((e for e in scope.norms if e.name == norm), None))
    elif stack is not None:
        streams = find_streams(scope, flow, attention, channel)
    added = find_contributions(inner, way, attention, channel)
    if stack is not None:
        sites["resid_streams"] = sites["resid_post"]
    if stack is not None and lane is None:
        name_moves(scope, flow, added, streams)
    sites |= attention.sites | channel.sites | added.sites | streams.sites
    part = Part(
        run.name,
        run.call,
        _in_forward_order(sites),
        attention.absent | channel.absent | streams.absent,
        attention.modules | channel.modules | added.modules | streams.modules,
        attention.constants | added.constants | streams.constants,
        attention.gate,
        attention.beside | added.beside | streams.beside,
        added.to_mid,
        added.to_post,
        None if lane is None else lane.index,
        () if lane is None else lane.beyond,
        channel.formulas | added.formulas,
        added.to_attn,
        continues,
    )
    return part, LayerFacts(parallel=channel.parallel, **attention.facts, **channel.facts)


def _in_forward_order(sites: dict[str, Site]) -> dict[str, Site]:
    return {name: sites[name] for name in POINTS if name in sites}


def _trunk(
    trace: Trace, model: PreTrainedModel, runs: Sequence[Event], ids: Tensor, stack: View | None
) -> tuple[Part, Entry, dict[str, Any]]:
    sites: dict[str, Site] = {}
    modules: dict[str, str] = {}
    beside: dict[str, Site] = {}
    absent: dict[str, str] = {}
    before = trace.calls(trace.events[: runs[0].index])
    after = trace.calls(trace.events[runs[-1].end :])

    embedding = next((e for e in before if _reads_ids(e, ids)), None)
    if embedding is None:
        absent["embeddings"] = "no module turns the token ids into vectors before the first block"
    else:
        sites["embeddings"] = output_site(embedding)
        modules["embedding"] = embedding.name
    scope = Scope(trace, runs[-1], stack)
    entry = _entry(before, Scope(trace, runs[0], stack))
    last = runs[-1].output()
    if stack is not None and (merge := next((e for e in after if _merges(scope, e, last)), None)) is not None:
        modules["stream_head"] = merge.name
        last = merge.output()
    elif stack is not None:
        modules |= stream_outlets(scope, after)
        last = next((taken[1] for e in reversed(after) if scope.is_norm(e) and (taken := hidden_input(e))), last)
    norm = next((e for e in after if scope.is_norm(e) and (read := hidden_input(e)) and same(read[1], last)), None)
    if norm is None:
        absent["final_norm"] = "no norm reads the last block's output, or what is merged of its streams"
    else:
        sites["final_norm"] = output_site(norm)
        if stack is not None and "stream_head" not in modules:
            beside["merged"] = input_site(norm)
        modules["final_norm"] = norm.name

    head = next((e for e in reversed(after) if is_linear(e)), None)
    constants = _unembedding_scale(norm.output() if norm is not None else last, head)
    unembedded = head.output() if head is not None else None
    sizes: dict[str, Any] = {"d_model": scope.width, "n_ctx": _context(model)}
    if stack is not None:
        sizes["n_streams"] = stack.streams
    if head is None or unembedded is None:
        absent["lm_head"] = absent["logits"] = "this model has no unembedding after its blocks"
    else:
        sites["lm_head"] = output_site(head)
        modules["lm_head"] = head.name
        sizes["vocab_size"] = unembedded.shape[-1]
        whole = trace.events[0]
        slot = next((s for s, v in whole.outputs if v.shape[-1] == sizes["vocab_size"]), "logits")
        sites["logits"] = ModuleSite("", "output", slot)
    return Part("", 0, _in_forward_order(sites), absent, modules, constants, beside=beside), entry, sizes


def _unembedding_scale(given: Value | None, head: Event | None) -> dict[str, float]:
    """What the final norm's output is multiplied by before it is unembedded; nothing where more than that happens."""
    taken = hidden_input(head) if head is not None else None
    if given is None or taken is None or given.shape != taken[1].shape:
        return {}
    a, b = given.data.flatten().double(), taken[1].data.flatten().double()
    scale = float((a @ b) / (a @ a).clamp_min(1e-30))
    rounding = 4 * torch.finfo(given.data.dtype).eps
    scale = 1.0 if abs(scale - 1) < rounding else scale
    return (
        {"unembedding_scale": scale}
        if torch.allclose(scale * a, b, rtol=rounding, atol=rounding * float(b.std()))
        else {}
    )


def _outputs(trace: Trace, n_pos: int) -> dict[str, tuple[ModuleSite, int]]:
    found: dict[str, tuple[ModuleSite, int]] = {}
    for event in trace.calls(trace.events):
        value = event.output()
        if value is None or not event.name:
            continue
        if event.name in found:
            site, calls = found[event.name]
            found[event.name] = (site, calls + 1)
            continue
        shared = isinstance(event.module, nn.Embedding) and value.tensor.dim() == 2
        layout = (
            "shared"
            if shared
            else "tokens"
            if value.shape[:2] == (1, n_pos)
            else "flat"
            if value.shape[0] == n_pos
            else "raw"
        )
        found[event.name] = (output_site(event, View(layout)), 1)
    return found


def _logit_ops(trace: Trace, head: str | None) -> tuple[tuple[str, float], ...]:
    """Multiplications, divisions and tanh after the unembedding, in order."""
    end = next((e.end for e in reversed(trace.calls(trace.events)) if e.name == head), len(trace.events))
    found: list[tuple[str, float]] = []
    for op in trace.events[end:]:
        name = _LOGIT_OPS.get(op.name) if op.is_op else None
        if name is not None and (op.scalars or name == "tanh"):
            found.append((name, float(op.scalars[0]) if op.scalars else 0.0))
    return tuple(found)


_LOGIT_OPS = {"tanh": "tanh"} | dict.fromkeys(QUOTIENTS, "div") | dict.fromkeys(PRODUCTS, "mul")


def _merges(scope: Scope, event: Event, last: Value | None) -> bool:
    """A module that makes one vector per token of the last block's stack of streams."""
    taken, given = hidden_input(event), event.output()
    one = given is not None and given.shape == (1, scope.n_pos, scope.width)
    return one and taken is not None and same(taken[1], last)


def _reads_ids(event: Event, ids: Tensor) -> bool:
    leaf = event.module is not None and not any(True for _ in event.module.children())
    reads = any(v.tensor.data_ptr() == ids.data_ptr() for _, v in event.inputs)
    return leaf and reads and event.output() is not None


def _entry(before: Sequence[Event], first: Scope) -> Entry:
    """Which embedding modules' outputs make the first residual, with what factor, and under which norm."""
    residual = first.residual[1]
    norm = next((e for e in before if first.is_norm(e) and same(e.output(), residual)), None)
    read = hidden_input(norm) if norm is not None else None
    target = read[1] if read is not None else residual
    data = target.data if first.stack is None else first.stack.read(target.data, 1)
    outputs = [(e.name, e.output()) for e in before if isinstance(e.module, nn.Embedding) or _integer_input(e)]
    given = [(n, v.data if first.stack is None else v.data.unsqueeze(-2)) for n, v in outputs if v is not None]
    wide = [(n, v) for n, v in given if _broadcasts(v.shape, data.shape)]
    for take in range(1, len(wide) + 1):
        total = torch.stack([v.expand_as(data) for _, v in wide[:take]]).sum(0)
        scale = float((total * data).sum() / total.pow(2).sum().clamp_min(1e-30))
        scale = 1.0 if abs(scale - 1) < 1e-2 else scale
        if torch.allclose(scale * total, data, rtol=1e-2, atol=1e-5):
            return Entry(tuple(n for n, _ in wide[:take]), scale, norm.name if norm is not None else None)
    return Entry()


def _broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(shape[::-1], whole[::-1], strict=False))


def _integer_input(event: Event) -> bool:
    leaf = event.module is not None and not any(True for _ in event.module.children())
    return leaf and any(not v.tensor.is_floating_point() and v.tensor.dtype is not torch.bool for _, v in event.inputs)


def _context(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
