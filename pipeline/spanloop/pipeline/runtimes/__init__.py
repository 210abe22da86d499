"""Shells that carry the same stages: embedded here; others stand beside it."""
