"""Rewards: pure functions of an orchestration's content and its feedback. One family a file; ``compose`` joins them."""
