"""Other vocabularies for the same points, as data. A second spelling is never a second table of tensors."""

from collections.abc import Mapping
from types import MappingProxyType

from locant.errors import UnknownPoint, did_you_mean
from locant.points import POINTS

LOCATOR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "embeddings",
        "resid.pre": "resid_pre",
        "resid.mid": "resid_mid",
        "resid.post": "resid_post",
        "attn.in": "attn_in",
        "attn.q": "query",
        "attn.k": "key",
        "attn.v": "value",
        "attn.pattern": "attn_probs",
        "attn.z": "z",
        "attn.out_pre_norm": "attn_out",
        "attn.out": "attn_out_post",
        "mlp.in": "mlp_in",
        "mlp.pre": "mlp_pre",
        "mlp.pre_linear": "mlp_pre_linear",
        "mlp.post": "mlp_act",
        "mlp.out_pre_norm": "mlp_out",
        "mlp.out": "mlp_out_post",
    }
)
"""The dotted activation names of locators, each with the point it is."""

_DOTTED = {point: dotted for dotted, point in LOCATOR_NAMES.items()}


def point_of(name: str) -> str:
    """The point that a locator means: by its dotted name, or by the point's own.

    Raises:
        UnknownPoint: it is neither.
    """
    if name in POINTS:
        return name
    if name in LOCATOR_NAMES:
        return LOCATOR_NAMES[name]
    raise UnknownPoint(
        asked=f"{name}: no such activation",
        has=f"A locator takes the {len(POINTS)} points and {len(LOCATOR_NAMES)} dotted names like resid.post",
        instead=did_you_mean(name, [*LOCATOR_NAMES, *POINTS]),
    )


def locator_name(point: str) -> str:
    """How a locator's results spell a point: its dotted name, or the point's own where it has none.

    Raises:
        UnknownPoint: no point has this name.
    """
    return _DOTTED.get(point) or point_of(point)
