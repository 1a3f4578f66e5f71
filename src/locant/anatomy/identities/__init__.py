"""IDENTITIES: one row per equation that holds between the points of one forward, in forward order."""

from locant.anatomy.identities import residual, attention, channel  # noqa: I001 - their rows, in forward order
from locant.anatomy.identities.table import IDENTITIES, Identity

__all__ = ["IDENTITIES", "Identity", "attention", "channel", "residual"]
