"""Load a model for a command, with progress of one kind."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locant.cli.terminal import progress
from locant.errors import ModelError

if TYPE_CHECKING:
    from locant.engine.eager.model import EagerModel


@dataclass(frozen=True, slots=True)
class Source:
    """What the command line says of the model."""

    model: str
    dtype: str | None = None
    device: str | None = None
    attention: str | None = None
    revision: str | None = None
    trust: bool = False

    def load(self) -> EagerModel:
        """The model, its points proven.

        Raises:
            ModelError: the model or the device is not to be had.
        """
        with progress(f"Loading {self.model}, finding its points and proving them"):
            import torch

            from locant.load import load_model

            _check_device(self.device)
            with _quiet():
                return load_model(
                    self.model,
                    dtype=None if self.dtype is None else getattr(torch, self.dtype),
                    device=self.device,
                    attn_implementation=self.attention,
                    revision=self.revision,
                    trust_remote_code=self.trust,
                )


def _check_device(device: str | None) -> None:
    """Before minutes of loading: is there such a device?"""
    import torch

    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        found += ["mps"] if torch.backends.mps.is_available() else []
        raise ModelError(
            f"device {device!r} cannot be used: {str(error).splitlines()[0]}",
            has=f"cpu{''.join(f', {name}' for name in found)}",
        ) from error


@contextmanager
def _quiet() -> Generator[None]:
    """No progress bars of transformers, which would run over locant's own; afterwards as they were."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    names = gguf.__dict__
    bar: Any = names.get("tqdm")
    if shown:
        logging.disable_progress_bar()
    if bar is not None:
        names["tqdm"] = _no_bar  # the one bar that asks no switch
    try:
        yield
    finally:
        if bar is not None:
            names["tqdm"] = bar
        if shown:
            logging.enable_progress_bar()


def _no_bar(items: Any, **_: object) -> Any:
    return items
