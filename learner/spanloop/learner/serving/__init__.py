"""Serving: the port through which the learner loads and probes versions, its HTTP adapter, and the embedded server."""
