"""Topics of the log. Sources of truth are immutable; derived topics can be rebuilt from them."""

from __future__ import annotations

__all__ = ["ALL_TOPICS", "DERIVED", "INTERNAL", "SINGLE", "SOURCES"]

SPANS = "spans"
"""SpansReceived: OTLP as received, after the allow-list. Key: tenant/trace id."""
FEEDBACK = "feedback"
"""FeedbackReceived: scores and outcomes from a scorer's credential. Key: tenant/target."""
POLICIES = "policies"
"""Candidates, batch boundaries, gate and canary results, promotions, rollbacks, routing."""
MODELS = "models"
"""ValueModelPublished, DecisionModelPublished: versions of value models that credit used, and of decision models."""
ORCHESTRATIONS = "orchestrations"
"""OrchestrationRevised. Key: tenant/orchestration id."""
REWARDS = "rewards"
"""RewardsComputed."""
CREDITS = "credits"
"""CreditAssigned."""
SAMPLES = "samples"
"""SamplesBuilt."""
DEAD_LETTERS = "dead_letters"
"""DeadLettered: what was refused, with its bytes and the reason."""

OPERATIONS = "operations"
"""Internal to the partitioned runtime: operations, evidence, joins and routed feedback on their way to the partition that
assembles them. Can be rebuilt from spans and feedback; embedded workspaces have none."""
LESSONS = "lessons"
"""Internal to the partitioned runtime: final orchestrations and rewards on their way to the value stage. Key: tenant."""

SOURCES = (SPANS, FEEDBACK, POLICIES, MODELS)
DERIVED = (ORCHESTRATIONS, REWARDS, CREDITS, SAMPLES)
INTERNAL = (OPERATIONS, LESSONS)
SINGLE = (POLICIES, MODELS, SAMPLES, DEAD_LETTERS)
"""Topics with one partition, because their readers need one order."""
ALL_TOPICS = (*SOURCES, *DERIVED, DEAD_LETTERS)
