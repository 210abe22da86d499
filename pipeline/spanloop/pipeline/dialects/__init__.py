"""Dialects: how each instrumentation writes agents, model calls and tools into spans, read into one
``Operation``.

A new dialect is a new file with ``NAME``, ``matches`` and ``read`` plus one line in ``detect.DIALECTS``;
assembly does not change.
"""

from spanloop.pipeline.dialects.detect import DIALECTS, Dialect, operation_of
from spanloop.pipeline.dialects.operation import Operation, decode_operation, encode_operation

__all__ = ["DIALECTS", "Dialect", "Operation", "decode_operation", "encode_operation", "operation_of"]
