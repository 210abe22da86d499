"""Credit: how a team's reward becomes integer accounts of orchestrator, roles, agents, turns, messages, tool calls and tokens."""
