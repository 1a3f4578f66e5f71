"""What plain Hugging Face says of a forward pass: claims about points, from its own outputs and hooks by name.

Nothing of locant is used: modules are found by the names that transformers' modeling files give them, and a family
whose names are not in these tables makes fewer claims. Each claim names the recipe it comes from.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_TOWERS = ("vision", "visual", "audio", "image", "patcher", "speech", "codec", "talker", "token2wav")
_LISTS = ("layers", "h", "blocks", "layer", "block")
_ATTENTION = (
    "self_attn attn.attention attn self_attention norm_attn_norm.attn attention.self attention "
    "multi_head_attention temporal_block"
)
_OTHER_MIXERS = "linear_attn mamba conv mixer short_conv mlstm_layer"
_OUT = "o_proj out_proj dense c_proj wo Wo resid_out o_b_proj linear_out attention_out"
_QUERY, _KEY, _VALUE = "q_proj q_b_proj wq query", "k_proj wk key", "v_proj wv value"
_GATE = "gate_proj g_proj"
_QK_NORMS = {"q": "q_norm q_layernorm query_layernorm", "k": "k_norm k_layernorm key_layernorm"}
_MLP = "mlp mlp_block feed_forward ffn block_sparse_moe moe ff feedforward mixer"
_DOWN = "down_proj c_proj fc2 dense_4h_to_h wo fc_out w2 dense_2 proj_2 linear_2 layer_2 out_proj"
_FUSED = "gate_up_proj Wi fc1"
_UP, _BRANCHES = "up_proj fc1 c_fc dense_h_to_4h fc_in layer_1", ("gate_proj w1 wi_0", "up_proj w3 wi_1")
_NORM_BEFORE_MLP = (
    "pre_feedforward_layernorm pre_ff_layernorm pre_mlp_layernorm pre_moe_layernorm ln_2 ffn_norm norm2 ln2 mlp_norm "
    "norm_attn_norm.norm_2 post_attention_layernorm final_layer_norm post_attn_norm"
)
_NORM_OF_SUM = "self_attn_layer_norm attention.output.LayerNorm ln_1"
_NORM_OF_SECOND_SUM = "final_layer_norm output.LayerNorm ln_2"
_FINAL_NORM = (
    "norm final_layernorm final_layer_norm ln_f norm_f layer_norm final_norm ln_out embedding_norm layernorm_embedding "
    "ln layernorm LayerNorm out_norm"
)


@dataclass(frozen=True)
class Claim:
    """The point at `address` is `value` ``[batch, pos, ...]``, says `recipe`.

    ``a.0+b.0`` claims a sum of points, ``a#2`` the third layer that has the point at all, and `through` what to do
    with the point first.
    """

    address: str
    recipe: str
    value: Tensor
    through: Callable[[Tensor], Tensor] | None = None


@dataclass
class Call:
    """One call of a module: copies of what went in and came out; `start` and `end` say which calls it encloses."""

    name: str
    start: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    end: int = -1
    out: Any = None

    @property
    def given(self) -> Tensor | None:
        """The hidden states that go in."""
        named = (self.kwargs.get(k) for k in ("hidden_states", "x", "hidden_state", "input", "inputs"))
        return next((v for v in (*self.args, *named) if isinstance(v, Tensor) and v.is_floating_point()), None)

    @property
    def result(self) -> Tensor | None:
        """The first tensor that comes out."""
        out = self.out if isinstance(self.out, tuple) else (self.out,)
        return next((v for v in out if isinstance(v, Tensor)), None)


@dataclass
class Attended:
    """What one call of the attention function got and gave, after `start` calls of modules."""

    start: int
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None


@dataclass
class Record:
    """One forward, seen by hooks on every module and, where the family allows it, by its attention function."""

    output: Any
    calls: list[Call] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)


@torch.no_grad()
def claims(model: PreTrainedModel, ids: Tensor) -> list[Claim]:
    """Everything the recipes can say of `model` on `ids` ``[batch, pos]``."""
    record = _record(model, ids)
    blocks = _blocks(model, record)
    found = [*_trunk(model, record, blocks)]
    for layer, block in enumerate(blocks):
        found += _Block(model, record, block, layer, ids.shape).claims()
    return [*found, *_outputs(model, blocks, ids)]


# ---- one forward


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return tuple(map(_copy, value))
    return None


def _record(model: PreTrainedModel, ids: Tensor) -> Record:
    record, open_calls = Record(None), []

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            call = Call(name, len(record.calls), _copy(args), {k: _copy(v) for k, v in kwargs.items()})
            record.calls.append(call)
            open_calls.append(call)

        return hook

    def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = open_calls.pop()
        call.end, call.out = len(record.calls), _copy(out)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    with _attention_watched(model, record):
        record.output = model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return record


@contextmanager
def _attention_watched(model: PreTrainedModel, record: Record) -> Iterator[None]:
    """Look at the arguments of ``eager_attention_forward`` in every modeling file that has one."""
    files = [vars(sys.modules[name]) for name in {type(module).__module__ for module in model.modules()}]
    originals = [(file, file["eager_attention_forward"]) for file in files if "eager_attention_forward" in file]

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
            out = original(module, query, key, value, *rest, **options)
            record.attended.append(Attended(len(record.calls), *_copy((query, key, value, out[1]))))
            return out

        return attend

    try:
        for file, original in originals:
            file["eager_attention_forward"] = watched(original)
        yield
    finally:
        for file, original in originals:
            file["eager_attention_forward"] = original


def _blocks(model: PreTrainedModel, record: Record) -> list[Call]:
    """The calls of the elements of the outermost lists of layers, in order."""
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.rpartition(".")[2] in _LISTS]
    lists = [n for n in lists if not any(word in n for word in _TOWERS)]
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    return [c for c in record.calls if c.name.rpartition(".")[0] in outer and c.name.rpartition(".")[2].isdigit()]


# ---- recipes


def _trunk(model: PreTrainedModel, record: Record, blocks: Sequence[Call]) -> Iterator[Claim]:
    paths = {module: name for name, module in model.named_modules()}
    yield Claim("logits", "model(ids).logits", record.output.logits)
    if not blocks:
        return
    before, after = record.calls[: blocks[0].start], record.calls[blocks[-1].end :]
    for point, module, calls in (
        ("embeddings", model.get_input_embeddings(), before),
        ("lm_head", model.get_output_embeddings(), after[::-1]),
    ):
        call = next((c for c in calls if module is not None and c.name == paths.get(module)), None)
        if call is not None and call.result is not None:
            yield Claim(point, f"output of {call.name}", call.result)
    for call in after:
        trunk, _, leaf = call.name.rpartition(".")
        if leaf in _FINAL_NORM.split() and blocks[-1].name.startswith(trunk) and call.result is not None:
            yield Claim("final_norm", f"output of {call.name}", call.result)
            return


def _outputs(model: PreTrainedModel, blocks: Sequence[Call], ids: Tensor) -> Iterator[Claim]:
    """What the model itself returns on request."""

    def asked(**option: bool) -> list[Tensor]:
        (name,) = option
        try:
            output = model(input_ids=ids, use_cache=False, **option)
        except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError, IndexError, KeyError):
            return []
        values = getattr(output, name.removeprefix("output_"), None) or ()
        return [value for value in values if isinstance(value, Tensor)]

    states = asked(output_hidden_states=True)
    # some families list the residual after each block, not before it
    if len(states) == len(blocks) + 1 and blocks and torch.equal(states[0], blocks[0].given):
        once = len({block.name for block in blocks}) == len(blocks)
        for layer, state in enumerate(states[:-1]):
            if layer == 0 or once:
                yield Claim(f"resid_pre.{layer}", "output_hidden_states", state)
            else:  # between the runs of a looped trunk something happens to it
                yield Claim(f"resid_post.{layer - 1}", "output_hidden_states", state)
    for index, weights in enumerate(asked(output_attentions=True)):
        yield Claim(f"attn_probs#{index}", "output_attentions", weights)
        scaled = weights[..., : ids.shape[1]]
        scaled = scaled / scaled.sum(-1, keepdim=True)
        yield Claim(f"attn_scores#{index}", "output_attentions", scaled, lambda scores: scores.softmax(-1))
    for index, logits in enumerate(asked(output_router_logits=True)):
        shares = torch.allclose(logits.sum(-1), torch.ones_like(logits[..., 0]), atol=1e-4)
        taken = (lambda read: read.softmax(-1)) if shares else None
        yield Claim(f"router_logits#{index}", "output_router_logits", logits.reshape(*ids.shape, -1), taken)


class _Block:
    """The recipes for one call of one block."""

    def __init__(self, model: PreTrainedModel, record: Record, block: Call, layer: int, shape: Sequence[int]) -> None:
        self.model, self.record, self.block, self.layer, self.shape = model, record, block, layer, tuple(shape)
        enclosed = record.calls[block.start + 1 : block.end]
        self.inside = {c.name[len(block.name) + 1 :]: c for c in reversed(enclosed)}

    def claims(self) -> list[Claim]:
        pre, post = self.block.given, self.block.result
        found = [*self.claim("resid_pre", "input of the block", pre)]
        found += self.claim("resid_post", "output of the block", post)
        attention = self.find(_ATTENTION)
        mixer = attention or self.find(_OTHER_MIXERS)
        if mixer is not None:
            found += self.claim("attn_in", "input of the mixer", mixer.given)
        if attention is not None:
            found += self._attention(attention)
        elif mixer is not None:
            found += self.claim("attn_out", "output of the mixer", mixer.result)
        mlp = self.find(_MLP)
        found += self._spread() if mlp is None else self._mlp(mlp)
        return [*found, *self._residual(mixer, mlp or self.find("fc1 intermediate.dense"), pre, post)]

    def find(self, names: str, within: str = "") -> Call | None:
        return next((self.inside[within + name] for name in names.split() if within + name in self.inside), None)

    def path(self, call: Call) -> str:
        return call.name[len(self.block.name) + 1 :]

    def claim(self, point: str, recipe: str, value: Tensor | None) -> Iterator[Claim]:
        """A claim, if `value` has one row per token, flat or not."""
        batch, pos = self.shape
        if value is not None and value.shape[:2] == self.shape:
            yield Claim(f"{point}.{self.layer}", recipe, value)
        elif value is not None and value.shape[0] == batch * pos:
            yield Claim(f"{point}.{self.layer}", recipe, value.reshape(batch, pos, -1))

    def _residual(self, mixer: Call | None, mlp: Call | None, pre: Any, post: Any) -> Iterator[Claim]:
        """What each part added, from the residual before and after it."""
        added = next((c.result for c in (mixer, mlp) if c is not None and c.result is not None), None)
        if pre is None or post is None or added is None or pre.shape != post.shape:
            return
        if pre.shape != (*self.shape, added.shape[-1]):
            yield from self._streams(mixer, mlp, *(self._stack(value, added.shape[-1]) for value in (pre, post)))
            return
        if mixer is None or mlp is None or mixer is mlp:
            yield from self.claim("attn_out_post", "resid_post - resid_pre", post - pre)
            yield from self.claim("mlp_out_post", "resid_post - resid_pre", post - pre)
            return
        carried_to_mid, carried_to_post = CARRIED.get(self.family, (_as_it_is, _as_it_is))
        mid, second = self._middle(mixer, mlp)
        if mid is None or mid.numel() != pre.numel() or torch.equal(mid.view_as(pre), pre):
            yield Claim(f"attn_out_post.{self.layer}+mlp_out_post.{self.layer}", "resid_post - resid_pre", post - pre)
            return
        mid = mid.view_as(pre)
        yield from self.claim("resid_mid", "input of the norm after the sum", mid)
        if carried_to_mid is not None:
            yield from self.claim("attn_out_post", "resid_mid - resid_pre", mid - carried_to_mid(self, pre))
        if second is not None:
            yield from self.claim("mlp_out_post", "sum before the second norm - output of the first", second)
        elif carried_to_post is not None:
            yield from self.claim("mlp_out_post", "resid_post - resid_mid", post - carried_to_post(self, mid))

    def _stack(self, value: Tensor, width: int) -> Tensor:
        """The residual streams as ``[batch, pos, stream, width]``."""
        if value.dim() == 4:
            return value if value.shape[:2] == self.shape else value.movedim(0, 2)
        return value.unflatten(-1, (-1, width))

    def _streams(self, mixer: Call | None, mlp: Call | None, pre: Tensor, post: Tensor) -> Iterator[Claim]:
        """What the modules that read and write a stack of residual streams are given and give."""
        yield from self.claim("resid_streams", "output of the block", post)
        first, second = self.find("attn_hc attn_hyper_connection"), self.find("ffn_hc mlp_hyper_connection")
        stacks = {"resid_pre": pre, "resid_post": post}
        if first is not None and second is not None and mixer is not None and mlp is not None:
            middle = stacks["resid_mid"] = self._stack(second.given, pre.shape[-1])
            yield from self._coefficients("attn", first, mixer.result, pre, middle)
            yield from self._coefficients("mlp", second, mlp.result, middle, post)
        if hasattr(self.module, "altup"):
            altup: Any = self.module.altup
            mixed = altup.predict(self.block.given).movedim(0, 2)
            yield Claim(f"attn_stream_mix.{self.layer}", "altup.predict", mixed, lambda mix: mix.mT @ pre)
            active = mixed[:, :, altup.config.altup_active_idx]
            yield from self.claim("attn_stream_collapse", "altup.predict", active)
        for point, stack in stacks.items():
            for stream in range(stack.shape[2]):
                yield Claim(f"{point}.{self.layer}.stream-{stream}", "its place in the stack", stack[:, :, stream])

    def _coefficients(self, part: str, call: Call, added: Tensor, before: Tensor, after: Tensor) -> Iterator[Claim]:
        flat = call.name.endswith("connection")
        write, collapse = (call.out[2], call.out[0]) if flat else (call.out[0], call.out[-1])
        yield from self.claim(f"{part}_out_post", "output of the sublayer", added)
        yield from self.claim(f"{part}_stream_write", "output of the hyper-connection", write)
        yield from self.claim(f"{part}_stream_collapse", "output of the hyper-connection", collapse)
        mixed = after - write.unsqueeze(-1) * added.unsqueeze(-2)
        yield Claim(
            f"{part}_stream_mix.{self.layer}", "stack after - write · output", mixed, lambda mix: mix.mT @ before
        )

    def _middle(self, mixer: Call, mlp: Call) -> tuple[Tensor | None, Tensor | None]:
        """The residual between attention and MLP, and what the MLP adds where a norm follows each sum."""
        if self.find("post_feedforward_layernorm") and not self.find("pre_feedforward_layernorm"):
            return mlp.given, None
        norm = self.find(_NORM_BEFORE_MLP)
        if norm is not None and mixer.end <= norm.start < mlp.start + 2:
            return norm.given, None
        first, second = self.find(_NORM_OF_SUM), self.find(_NORM_OF_SECOND_SUM)
        if first is None or second is None or second.start < mlp.start or None in (first.result, second.given):
            return None, None
        return first.given, second.given - first.result

    @property
    def module(self) -> nn.Module:
        return self.model.get_submodule(self.block.name)

    @property
    def family(self) -> str:
        """What `CARRIED` calls the model."""
        config = self.model.config
        post = "_post" if getattr(config, "apply_residual_connection_post_layernorm", False) else ""
        return self.model.config.get_text_config().model_type + post

    def _attention(self, attention: Call) -> Iterator[Claim]:
        within = f"{self.path(attention)}."
        calls = [a for a in self.record.attended if attention.start < a.start <= attention.end]
        out = self.find(_OUT, within)
        if within.endswith("attention.self."):
            out = self.find("attention.output.dense")
        if out is not None:
            yield from self.claim("attn_out", "output of the output projection", out.result)
            yield from self.claim("z", "input of the output projection", out.given)
        for point, names in (("query", _QUERY), ("key", _KEY), ("value", _VALUE), ("attn_gate", _GATE)):
            call = self.find(names, within)
            if call is not None and call.result is not None and not (point == "value" and calls):
                with_gate = point == "query" and out is not None and call.result.shape[-1] == 2 * out.given.shape[-1]
                yield from self.claim("attn_gate" if with_gate else point, "output of the projection", call.result)
        for side, names in _QK_NORMS.items():
            call = self.find(names, within)
            if call is not None and call.given is not None and call.result is not None:
                yield Claim(f"{side}_norm_in.{self.layer}", "input of QK-norm", call.given)
                yield Claim(f"{side}_norm_out.{self.layer}", "output of QK-norm", call.result)
        if len(calls) == 1:
            yield from self._attended(calls[0])

    def _attended(self, call: Attended) -> Iterator[Claim]:
        for point, value in (("query_rotated", call.query), ("key_rotated", call.key), ("value", call.value)):
            yield Claim(f"{point}.{self.layer}", "argument of the attention function", value)
        if call.weights is not None:
            yield Claim(f"attn_probs.{self.layer}", "weights of the attention function", call.weights)

    def _spread(self) -> Iterator[Claim]:
        """An MLP whose projections are children of the block."""
        up, down = self.find("fc1 intermediate.dense"), self.find("fc2 output.dense")
        if up is not None and down is not None:
            yield from self.claim("mlp_in", "input of the up projection", up.given)
            yield from self.claim("mlp_pre", "output of the up projection", up.result)
            yield from self.claim("mlp_act", "input of the down projection", down.given)
            yield from self.claim("mlp_out", "output of the down projection", down.result)

    def _mlp(self, mlp: Call) -> Iterator[Claim]:
        within = f"{self.path(mlp)}."
        yield from self.claim("mlp_in", "input of the MLP", mlp.given)
        shared, last_norm = self.find("shared_mlp"), self.find("post_mlp_layernorm", within)
        down, after = self.find(_DOWN, within), self.find("post_feedforward_layernorm")
        if self.find("experts") is not None and after is not None:  # beside the MLP, and added to it
            yield from self.claim("mlp_out", "input of the norm after the MLP and the experts", after.given)
        elif down is not None:
            yield from self.claim("mlp_act", "input of the down projection", down.given)
            yield from self.claim("mlp_out", "output of the down projection", down.result)
            gate, up = (self.find(names, within) for names in _BRANCHES)
            if gate is not None and up is not None:
                yield from self.claim("mlp_pre", "output of the gate projection", gate.result)
                yield from self.claim("mlp_pre_linear", "output of the up projection", up.result)
            elif (up := self.find(_FUSED, within)) and up.result.shape[-1] == 2 * down.given.shape[-1]:
                for point, half in zip(("mlp_pre", "mlp_pre_linear"), up.result.chunk(2, -1), strict=True):
                    yield from self.claim(point, "half of the fused projection", half)
            elif (up := self.find(_UP, within)) is not None:
                yield from self.claim("mlp_pre", "output of the up projection", up.result)
        elif mlp.result is not None:
            whole = mlp.result if shared is None or shared.result is None else mlp.result + shared.result
            whole = whole if last_norm is None else last_norm.given
            yield from self.claim("mlp_out", "output of the MLP", whole)
            yield from self._experts(mlp)

    def _experts(self, mlp: Call) -> Iterator[Claim]:
        """The experts are handed tokens, indices and weights."""
        for call in self.record.calls[mlp.start + 1 : mlp.end]:
            values = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)]
            if call.name.rpartition(".")[2] == "experts" and len(values) == 3:
                for value in values[1:]:
                    point = "expert_weights" if value.is_floating_point() else "expert_indices"
                    yield Claim(f"{point}.{self.layer}", "argument of the experts", value.reshape(*self.shape, -1))


# ---- families whose blocks do more than add


def _as_it_is(_: _Block, residual: Tensor) -> Tensor:
    return residual


def _beam(index: int) -> Callable[[_Block, Tensor], Tensor]:
    """Each sum multiplies the residual by √((n - 1) / n), n counting the sums."""

    def carried(block: _Block, residual: Tensor) -> Tensor:
        n = 2 * (block.layer + 1) + index
        return residual * ((n - 1) / n) ** 0.5

    return carried


def _weighed(name: str) -> Callable[[_Block, Tensor], Tensor]:
    return lambda block, residual: getattr(block.module, name) * residual


def _normed(norm: str, factor: str = "") -> Callable[[_Block, Tensor], Tensor]:
    def carried(block: _Block, residual: Tensor) -> Tensor:
        scale = getattr(block.module, factor) if factor else 1.0
        return scale * getattr(block.module, norm)(residual)

    return carried


def _first_normed(block: _Block, residual: Tensor) -> Tensor:
    return block.module.pre_ln(residual) if block.layer == 0 else residual


def _with_mamba(block: _Block, residual: Tensor) -> Tensor:
    return residual + block.inside["mamba"].result * block.module.ssm_out_multiplier


def _zaya(sublayer: str) -> Callable[[_Block, Tensor], Tensor]:
    def carried(block: _Block, residual: Tensor) -> Tensor:
        scale: Any = getattr(block.module, f"post_{sublayer}_residual_scale")
        return (residual + scale.residual_bias) * scale.residual_scale

    return carried


def _dory(norm: str, weight: str) -> Callable[[_Block, Tensor], Tensor]:
    """A step from the normed residual towards what the sublayer puts out."""

    def carried(block: _Block, residual: Tensor) -> Tensor:
        module: Any = block.module
        step = (getattr(module, weight) * module.lambda_scale).abs()
        return getattr(module, norm)(residual) * (1 - step)

    return carried


CARRIED: dict[str, tuple[Callable[[_Block, Tensor], Tensor] | None, Callable[[_Block, Tensor], Tensor] | None]] = {
    "beam": (_beam(0), _beam(1)),
    "doge": (_weighed("input_residual"), _weighed("post_attention_residual")),
    "minimax": (
        _normed("input_layernorm", "attn_alpha_factor"),
        _normed("post_attention_layernorm", "mlp_alpha_factor"),
    ),
    "bloom_post": (_normed("input_layernorm"), _normed("post_attention_layernorm")),
    "dory": (_dory("input_layernorm", "lambda_1"), _dory("pre_feedforward_layernorm", "lambda_2")),
    "zaya": (_zaya("attention"), _zaya("mlp")),
    "rwkv": (_first_normed, _as_it_is),
    "falcon_h1": (_with_mamba, _as_it_is),
    # an embedding per layer is added and the whole is scaled after the MLP
    "gemma4_text": (_as_it_is, None),
    "gemma4_unified_text": (_as_it_is, None),
}
"""What each sum starts from, after attention and after the MLP, where it is not the residual; None: see there."""
