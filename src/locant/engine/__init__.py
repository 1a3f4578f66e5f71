"""Backends: one program of captures over each of them."""
