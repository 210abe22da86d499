"""Failure attribution: which agent and which step made an orchestration fail, from its own log and without a model call."""
