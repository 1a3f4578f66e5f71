"""EagerModel: a Hugging Face model as it is, with its points found, proven and readable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locant import __version__
from locant.address import Address, AddressLike, format_address
from locant.anatomy.anatomy import Anatomy
from locant.anatomy.evidence import Evidence
from locant.anatomy.facts import Facts
from locant.anatomy.proof import Verdict, prove
from locant.anatomy.sites import Site
from locant.anatomy.structure import CALL_ERRORS
from locant.anatomy.survey import attention_in_use, embedding_weight, input_device, probe_ids, survey
from locant.anatomy.written import Trial, around, noise, write_sites
from locant.engine.cache import Cache, Origin, resolve_positions
from locant.engine.eager.changing import Changes, Target
from locant.engine.eager.keeping import Kept, blank_padding, check_device
from locant.engine.eager.recall import recalled
from locant.engine.eager.taps import Change, Keep, Taps, disturbed, inference
from locant.engine.edits import Edit, Edits, as_edits
from locant.engine.plan import Addresses, Catalogue, Plan, as_addresses
from locant.engine.prompts import Batch, Encoder, Prompts
from locant.engine.served import Served
from locant.errors import EditError, ModelError, PointUnavailable, PromptError

_PLANS_KEPT = 256


class EagerModel:
    """A loaded language model whose forward pass can be read by name.

    Nothing of the model is changed: its modules, weights, flags and hooks are its own before and after every call.

    Args:
        hf: the model. Use :func:`locant.load_model` to load one from a name or a file.
        tokenizer: for prompts given as text; token ids work without one.
        name, revision: what captures say they come from.
        recall: take what an earlier process proved of the same model; for one that was loaded and not changed since.

    Attributes:
        hf: the Hugging Face model itself.

    Raises:
        ModelError: the model is no decoder-only language model, or its structure is not recognised.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str | None = None,
        revision: str | None = None,
        recall: bool = False,
    ) -> None:
        self.hf = _plain(hf)
        self.tokenizer = tokenizer
        self.name = name or self.hf.config.name_or_path or type(self.hf).__name__
        self.revision = revision or getattr(self.hf.config, "_commit_hash", None)
        self._lock = threading.RLock()
        self._plans: dict[object, tuple[Plan, Taps, Origin]] = {}
        self._written: dict[Address, tuple[Site, Verdict]] = {}
        self._examined_by(lambda: recalled(self.hf, self._examine) if recall else self._examine())

    def examine(self) -> None:
        """Find and prove the points again, after the model was changed: an adapter added, weights edited.

        Raises:
            ModelError: its structure is not recognised any more.
        """
        self._examined_by(self._examine)

    def _examined_by(self, examine: Callable[[], Catalogue]) -> None:
        with self._lock:
            self._modules = list(self.hf.modules())
            self._examined_as = (attention_in_use(self.hf), self.hf.dtype)
            self._catalogue = examine()
            self._plans.clear()
            self._written.clear()

    # ---- what it is

    @property
    def facts(self) -> Facts:
        """Sizes: ``n_layers``, ``d_model``, ``n_heads``, ``n_kv_heads``, ``head_dim``, ``d_mlp``, ``vocab_size``."""
        return self._catalogue.anatomy.facts

    @property
    def anatomy(self) -> Anatomy:
        """Where each point was found."""
        return self._catalogue.anatomy

    def points(self) -> Served:
        """Every point at every layer: served or refused, where, with which proof error, and why not."""
        return Served(self.name, self.facts, self._refresh().status())

    def refuses(self, address: AddressLike) -> str | None:
        """Why this model does not serve `address`; ``None`` when it does. Never raises."""
        try:
            return self._refresh().refuses(address)
        except ModelError as error:
            return str(error)

    def plan(self, addresses: Addresses, edits: Edits = ()) -> Plan:
        """What a capture of `addresses` will read and change, without running it; raises what it would raise."""
        return self._prepared(addresses, as_edits(edits))[0]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self.facts.to_dict().items())
        return f"EagerModel({self.name}: {sizes})"

    # ---- reading

    def capture(
        self,
        prompts: Prompts,
        addresses: Addresses,
        *,
        edits: Edits = (),
        positions: int | Sequence[int] | None = None,
        grad: bool = False,
        device: str | torch.device | None = None,
        prepend_bos: bool = True,
    ) -> Cache:
        """Run the model on `prompts` as far as `addresses` need, and read them.

        Args:
            prompts: text, token ids ``[pos]`` or ``[batch, pos]``, chat messages, or a list of these.
            addresses: one or several, as :class:`Address`, string or ``(name, layer)``; a module path reads that
                module's output.
            edits: changes to make in this forward, in forward order; an edited address is read as it was changed.
            positions: keep these positions only, so that the rest is never held. A negative one counts from the
                end of each prompt; one ``int`` drops the axis, a list keeps it.
            grad: keep the graph, so that a scalar of captured tensors can be differentiated down to
                ``embeddings``; the weights are frozen meanwhile. Padding is then left as the model computed it.
            device: where the captured tensors go; by default they stay where they were computed.
            prepend_bos: put the tokenizer's BOS before text that has none.

        Returns:
            Tensors ``[batch, pos, width]`` in the model's dtype, ``[batch, head, query, key]`` for attention.

        Raises:
            AddressError, PointError, PromptError, EditError: before any forward.
        """
        edits = as_edits(edits)
        plan, taps, origin = self._prepared(addresses, edits)
        batch = self._encoder.batch(prompts, prepend_bos)
        changes = self._changes(edits, plan, batch) if edits else None
        if positions is not None and grad:
            raise PromptError(
                "positions together with grad",
                has="selected positions are copies, which no later tensor depends on",
                instead="capture them all and index the result",
            )
        rows = None if positions is None else resolve_positions(positions, batch.lengths)
        check_device(device)
        drop = isinstance(positions, int)
        keep = Kept(plan, batch, rows, drop, device)
        tensors = self._read(taps, batch, keep, grad, changes)
        if batch.ragged and rows is None and not grad:
            blank_padding(tensors, plan, batch, self._own_memory())
        layouts = {a: plan.layouts[a].dropped() if drop else plan.layouts[a] for a in plan.reads}
        ordered = {a: tensors[a] for a in plan.reads}
        return Cache(ordered, batch.tokens, layouts, rows, self._with_strings(origin, batch))

    def run_with_cache(
        self, prompts: Prompts, addresses: Addresses | None = None, **options: Any
    ) -> tuple[Float[Tensor, "batch pos vocab"], Cache]:
        """The logits and the cache of the same forward: of every point served, unless `addresses` are named.

        `options` are those of :meth:`capture`.
        """
        wanted = list(self.plan(self.points().served() if addresses is None else addresses).reads)
        logits = Address("logits")
        cache = self.capture(prompts, [*wanted, *([] if logits in wanted else [logits])], **options)
        return cache[logits], cache.only(wanted)

    def unembed(self, residuals: Float[Tensor, "... d_model"]) -> Float[Tensor, "... vocab"]:
        """Logits of residual vectors: final norm, unembedding, then the family's scaling and soft-cap.

        Of several residual streams it takes what they are merged to before the final norm, or one of them.
        """
        if residuals.shape[-1] != self.facts.d_model:
            raise PointUnavailable(
                f"unembedding vectors of width {residuals.shape[-1]}",
                has=f"the residual is {self.facts.d_model} wide",
            )
        trunk = self.anatomy.trunk
        modules, scale = trunk.modules, trunk.constants.get("unembedding_scale")
        unproven = [n for n in ("final_norm", "lm_head") if n in modules and self.refuses(n)]
        merges = self.facts.n_streams > 1 and "final_norm" not in modules
        if "lm_head" not in modules or scale is None or unproven or merges:
            reason = trunk.absent.get("lm_head", "this model computes more than a norm between its residual and W_U")
            raise PointUnavailable("unembed", has=reason, instead="capture logits")
        head = self.hf.get_submodule(modules["lm_head"])
        values = residuals
        if "final_norm" in modules:
            values = self.hf.get_submodule(modules["final_norm"])(values)
        return self.anatomy.shape_logits(head(values * scale))

    def tokens(self, prompts: Prompts, prepend_bos: bool = True) -> tuple[tuple[int, ...], ...]:
        """The ids the model would read for `prompts`, one tuple per prompt."""
        return self._encoder.batch(prompts, prepend_bos).tokens

    # ---- inside

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(
            self.tokenizer, lambda: embedding_weight(self.hf).shape[0], self.facts.n_ctx, _rope_pivot(self.hf)
        )

    def _examine(self) -> Catalogue:
        with self._undisturbed(grad=False):
            anatomy = survey(self.hf)
        tape, ids = self._tape(anatomy)
        evidence = Evidence(anatomy, tape, ids, self.hf.get_submodule)
        other = None
        if anatomy.facts.n_streams > 1:
            with disturbed(self.hf, anatomy.blocks[0].sites["resid_pre"]):
                other = Evidence(anatomy, self._tape(anatomy)[0], ids, self.hf.get_submodule, disturbed=True)
        with self._undisturbed(grad=False):
            verdicts = prove(evidence, other)
        _check_causal(tape, anatomy, type(self.hf).__name__)
        return Catalogue(anatomy, verdicts)

    def _tape(self, anatomy: Anatomy) -> tuple[dict[Address, Tensor], Tensor]:
        """Every site read in one forward of two prompts that differ in their last token only."""
        ids = probe_ids(self.hf, 1, 6).repeat(2, 1)
        ids[1, -1] = ids[1, 0]
        reads: dict[Address, Site] = {a: site for a in anatomy.addresses() if (site := anatomy.site(a)) is not None}
        reads |= dict(anatomy.extras())
        taps = Taps(self.hf, reads)
        with self._undisturbed(grad=False):
            tape = taps.try_all(lambda: self.hf(input_ids=ids, use_cache=False), 2)
        return {a: t.to(ids.device) for a, t in tape.items()}, ids

    def _prepared(self, addresses: Addresses, edits: Sequence[Edit] = ()) -> tuple[Plan, Taps, Origin]:
        """The plan and the taps of a set of addresses, and what a capture of them says of itself; made once."""
        wanted = tuple(as_addresses(addresses))
        edited = tuple(dict.fromkeys(edit.address for edit in edits))
        key = (wanted, edited)
        with self._lock:
            self._refresh()
            if key in self._plans and self._plans[key][1].outdated():
                self.examine()
            if key not in self._plans:
                plan = self._catalogue.plan(wanted, {a: self._write_site(a) for a in edited})
                if len(self._plans) == _PLANS_KEPT:
                    self._plans.clear()
                self._plans[key] = plan, Taps(self.hf, plan.reads, plan.writes), self._origin(plan)
            return self._plans[key]

    def _refresh(self) -> Catalogue:
        """The catalogue of the model as it runs now: another attention kernel or dtype is examined anew."""
        if (attention_in_use(self.hf), self.hf.dtype) != self._examined_as:
            self.examine()
        return self._catalogue

    def _read(
        self, taps: Taps, batch: Batch, keep: Keep, grad: bool, change: Change | None = None
    ) -> dict[Address, Tensor]:
        inputs = batch.tensors(input_device(self.hf))
        with self._lock, self._undisturbed(grad):
            return taps.run(lambda: self.hf(**inputs, use_cache=False), len(batch), keep, grad, change)

    def _changes(self, edits: Sequence[Edit], plan: Plan, batch: Batch) -> Changes:
        stacked = {a: a.point is not None and "stream" in a.point.axes and a.stream is None for a in plan.writes}
        targets = {a: Target(plan.layouts[a], self._catalogue.width(a), stacked[a]) for a in plan.writes}
        special: Sequence[int] = () if self.tokenizer is None else self.tokenizer.all_special_ids
        if self.tokenizer is None and any(not edit.where.special_tokens for edit in edits):
            raise EditError("special_tokens=False", has="this model was loaded without a tokenizer, which knows them")
        return Changes(edits, targets, batch, frozenset(special))

    def _write_site(self, address: Address) -> Site:
        """Where `address` is changed; proven on this model when it is first asked for.

        Raises:
            PointError: it cannot be changed, on any model or on this one.
        """
        self._catalogue.check_writable(address)
        if address.point is None:
            return self._catalogue.site(address)
        if address not in self._written:
            for site in write_sites(address, self._catalogue.site(address)):
                self._written[address] = self._try_write(address, site)
                if self._written[address][1].state == "proven":
                    break
        site, verdict = self._written[address]
        if verdict.state != "proven":
            raise PointUnavailable(f"{format_address(address)}: {verdict.reason}", has=f"it is read at {site}")
        return site

    def _try_write(self, address: Address, site: Site) -> tuple[Site, Verdict]:
        """One forward as it is and one with noise written to `site`, and what their difference proves."""
        anatomy, wanted = self.anatomy, list[Tensor]()
        ids = probe_ids(self.hf, 2, 6)
        batch = Batch(tuple(map(tuple, ids.tolist())))
        reads = around(anatomy, address) | {address: copy(self._catalogue.site(address))}

        def change(_: Address, value: Tensor) -> Tensor:
            wanted.append(noise(value).clone())
            return wanted[-1].clone()

        def copied(_: Site, tensor: Tensor) -> Tensor:
            return tensor.clone()

        try:
            base = self._read(Taps(self.hf, reads), batch, copied, False)
            written = self._read(Taps(self.hf, reads, {address: site}), batch, copied, False, change)
        except CALL_ERRORS as error:
            return site, Verdict("refused", None, f"it cannot be written on this model: {error}")
        base, written = ({a: t.to(ids.device) for a, t in tape.items()} for tape in (base, written))
        if address.name == "resid_streams":  # the same stack as the residual, which the identities name
            written[Address("resid_post", address.layer)] = written[replace(address, stream=None)]
        got = written[address]
        sides = [Evidence(anatomy, tape, ids, self.hf.get_submodule) for tape in (base, written)]
        with self._undisturbed(grad=False):
            trial = Trial(
                address, sides[0], sides[1], (base, written), wanted[-1].to(got.device), got, self._catalogue.verdicts
            )
            return site, trial.judge()

    def _own_memory(self) -> set[int]:
        """Where the model's weights and buffers lie; a module may return one of them."""
        return {t.untyped_storage().data_ptr() for t in chain(self.hf.parameters(), self.hf.buffers())}

    @contextmanager
    def _undisturbed(self, grad: bool) -> Generator[None]:
        """Evaluation mode, and weights without gradients, for the length of a forward."""
        training = [m for m in self._modules if m.training]
        frozen = [p for p in self.hf.parameters() if p.requires_grad] if grad else []
        hook = None
        try:
            for module in training:
                module.training = False
            for parameter in frozen:
                parameter.requires_grad_(False)
            if grad:
                hook = self.hf.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_(True))
            with inference(grad):
                yield
        finally:
            if hook is not None:
                hook.remove()
            for module in training:
                module.training = True
            for parameter in frozen:
                parameter.requires_grad_(True)

    def _with_strings(self, origin: Origin, batch: Batch) -> Origin:
        if self.tokenizer is None:
            return origin
        return replace(origin, token_strings=tuple(tuple(self._encoder.strings(ids)) for ids in batch.tokens))

    def _origin(self, plan: Plan) -> Origin:
        verdict = self._catalogue.verdict
        return Origin(
            self.name,
            self.revision,
            str(self.hf.dtype).removeprefix("torch."),
            self.anatomy.attention,
            _versions(),
            {format_address(a): str(verdict(a) or "module output") for a in plan.reads},
        )


def _check_causal(tape: Mapping[Address, Tensor], anatomy: Anatomy, name: str) -> None:
    """Two prompts that differ in their last token must agree before it."""
    last = tape[Address("resid_post", anatomy.facts.n_layers - 1)]
    before = last[:, :-1]
    if not torch.allclose(before[0], before[1], rtol=1e-2, atol=1e-2 * float(before.abs().mean())):
        raise ModelError(
            f"{name}: its positions see later tokens",
            has="an encoder, or a model with bidirectional attention",
            instead="load a decoder-only language model",
        )


def _rope_pivot(hf: PreTrainedModel) -> int | None:
    """The length past which every prompt of a batch is rotated by other factors."""
    config = hf.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


def _plain(hf: PreTrainedModel) -> PreTrainedModel:
    model = getattr(hf, "_orig_mod", hf)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"a {type(hf).__name__} is no Hugging Face model",
            instead="pass a PreTrainedModel, or a name to load",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__}: an encoder-decoder model", instead="load a decoder-only model")
    compiled = next((n for n, m in model.named_modules() if getattr(m, "_compiled_call_impl", None)), None)
    if compiled is not None:
        raise ModelError(
            f"{type(model).__name__}: its module {compiled!r} is compiled, so hooks inside it never run",
            instead="load the model without compile()",
        )
    return model


def _versions() -> dict[str, str]:
    return {"locant": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
