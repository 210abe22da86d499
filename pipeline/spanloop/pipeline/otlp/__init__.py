"""OTLP trace requests, from wire bytes or files to ``schemas.Span``: pure functions that import and assemble share."""
