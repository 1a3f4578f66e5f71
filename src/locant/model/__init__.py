"""The module path under which the document that specifies locators imports :class:`locant.Index`."""
