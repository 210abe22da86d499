"""Adapters of the StateStore port, one technology a file."""
