"""Readers of files into the log."""
