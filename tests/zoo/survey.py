"""Survey one family as locant does at load, and say what comes out in the form of the record."""

import re
from collections.abc import Sequence
from functools import lru_cache

import torch
import transformers
from transformers import PreTrainedModel

from locant import POINTS, EagerModel, ModelError
from locant.engine.cache import spans_of
from locant.engine.plan import PointStatus
from locant.families import Family, Outcome
from zoo import CAUSAL, MULTIMODAL, VARIANTS, build
from zoo.sizes import UNBUILT

EVERY = [*CAUSAL, *MULTIMODAL, *VARIANTS]
"""All families, in the order of the record."""


@lru_cache(maxsize=1)
def examined(family: str) -> tuple[PreTrainedModel, EagerModel | ModelError]:
    """The model of a family and what locant makes of it; the last one is kept, for tests that ask one by one."""
    model = build(family)
    try:
        return model, EagerModel(model)
    except ModelError as error:
        return model, error


def surveyed(family: str) -> Family:
    """What the record says of a family, found out anew."""
    kind = "variant" if ":" in family else "causal" if family in CAUSAL else "multimodal"
    if family in UNBUILT:
        return Family(family, kind, dict.fromkeys(POINTS, Outcome("not yet", None, UNBUILT[family])))
    model, locant = examined(family)
    if kind == "multimodal" and not _runs_on_text(model):
        kind = "other"
    if isinstance(locant, ModelError):
        return Family(family, kind, dict.fromkeys(POINTS, Outcome("refused", None, _told(locant))))
    statuses = locant.points()
    return Family(family, kind, {name: _outcome([s for s in statuses if s.address.name == name]) for name in POINTS})


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}


def _runs_on_text(model: PreTrainedModel) -> bool:
    """Without locant: the model takes token ids and nothing else, and no encoder reads them."""
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(5, 13)[None], use_cache=False)
    except Exception:  # noqa: BLE001 - whatever a forward raises when an image is missing
        return False
    return True


def _told(error: ModelError) -> str:
    return "; ".join(part for part in (error.asked, error.has) if part)


def _outcome(statuses: Sequence[PointStatus]) -> Outcome:
    """One point over its layers: proven where it is at each layer that has it."""
    proven = [s for s in statuses if s.served]
    refused = [s for s in statuses if not s.served and s.proof != "not applicable"]
    errors = [s.error for s in (refused or proven) if s.error is not None and s.error < float("inf")]
    error = (float(f"{max(errors):.0e}") or 0) if errors else None
    if not refused:
        return Outcome("proven", error) if proven else Outcome("not applicable", None, statuses[0].reason)
    # the number itself differs from one machine to the next
    reason = re.sub(r" \(relative error [^)]*\)", "", refused[0].reason)
    layers = [s.address.layer for s in refused if s.address.layer is not None]
    where = f" (layers {spans_of(layers)})" if proven else ""
    return Outcome("refused", error, reason + where)
