"""Records of a topic to the columns of its tables (``tables.TABLES``), for ``archive``.

``cells`` (values) <- ``spans``, ``orchestrations``, ``ledgers``, ``facts`` (one builder a topic) <- ``build``.
"""

from __future__ import annotations

from spanloop.pipeline.columns.build import build

__all__ = ["build"]
