"""Adapters of the Log port, one technology a file, and ``scan``, which walks a log from start to end."""

from spanloop.pipeline.log.scan import scan

__all__ = ["scan"]
