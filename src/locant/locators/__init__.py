"""Locators: many places at once, and the index of rows they resolve to."""
