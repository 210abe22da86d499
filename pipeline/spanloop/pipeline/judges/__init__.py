"""Judges: somebody, usually a language model, who scores texts of an orchestration; what they say is feedback on the log."""
