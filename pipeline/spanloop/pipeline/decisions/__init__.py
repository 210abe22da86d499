"""Orchestration decisions O1 to O5: what was decided, what else was open, what it brought, and when to stop."""
