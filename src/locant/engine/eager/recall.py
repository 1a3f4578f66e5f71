"""Remember between processes what was found and proven in a model, as long as nothing that matters has changed."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import chain
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from locant import __version__
from locant.anatomy.survey import attention_in_use
from locant.engine.plan import Catalogue

_OWN = ("_forward_hooks", "_forward_pre_hooks", "forward")
_SAMPLED = 64
"""Numbers of each weight that its identity rests on, evenly spread."""


def recalled(hf: PreTrainedModel, examine: Callable[[], Catalogue]) -> Catalogue:
    """The catalogue that an earlier examination of the same model left on disk, else that of a new one.

    The same model has the same code, config, modules, dtype and device, and weights that agree in a sample of each.
    ``LOCANT_CACHE`` names another folder than ``~/.cache/locant``; empty, nothing is kept.
    """
    folder = os.environ.get("LOCANT_CACHE", str(Path.home() / ".cache" / "locant"))
    try:
        identity = _identity(hf) if folder else None
        path = Path(folder).expanduser() / f"{identity}.catalogue"
    except (OSError, TypeError, RuntimeError):  # a config, a weight or a home that cannot be written down
        identity, path = None, Path()
    if identity is None:
        return examine()
    try:
        kept = pickle.loads(path.read_bytes())  # noqa: S301 - the user's own folder, as models are
    except Exception:  # noqa: BLE001 - no file, half a file, or one that another version wrote
        kept = None
    if isinstance(kept, Catalogue):
        return kept
    catalogue = examine()
    _keep(path, catalogue)
    return catalogue


def _keep(path: Path, catalogue: Catalogue) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = pickle.dumps(catalogue)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(whole)
        Path(file.name).replace(path)  # at once, so that no one reads half of it
    except (OSError, pickle.PicklingError, AttributeError, TypeError):
        return  # a home that cannot be written to, or an operation that has no name


def _identity(hf: PreTrainedModel) -> str | None:
    """``None`` for a model that cannot be told from another: weights elsewhere, hooks or code of its own."""
    tensors = list(chain(hf.named_parameters(), hf.named_buffers()))
    hooked = any(vars(m).get(hooks) for m in hf.modules() for hooks in _OWN)
    foreign = any(not type(m).__module__.startswith(("transformers.", "torch.")) for m in hf.modules())
    if hooked or foreign or any(t.device.type == "meta" for _, t in tensors):
        return None
    digest = hashlib.sha256()
    for part in chain(_code(hf), (f"{name} {type(m).__qualname__}" for name, m in hf.named_modules())):
        digest.update(part.encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _code(hf: PreTrainedModel) -> Iterator[str]:
    yield from (__version__, torch.__version__, transformers.__version__, platform.python_version())
    yield from (str(attention_in_use(hf)), str(hf.dtype), hf.config.to_json_string(use_diff=False))
    yield inspect.getsource(inspect.getmodule(type(hf)) or type(hf))
    for package in ("locant", "locant.anatomy", "locant.anatomy.identities", "locant.engine", "locant.engine.eager"):
        for file in resources.files(package).iterdir():
            if file.name.endswith(".py"):
                yield file.read_text()


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return flat[:: flat.numel() // _SAMPLED + 1].cpu().contiguous().view(torch.uint8).numpy().tobytes()
