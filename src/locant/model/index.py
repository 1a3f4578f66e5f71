"""``from locant.model.index import Index`` is ``from locant import Index``."""

from locant.locators.index import Index

__all__ = ["Index"]
