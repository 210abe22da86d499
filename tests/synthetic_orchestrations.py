"""Synthetic orchestrations for tests: deterministic functions of a seed, shaped like real ones.

An orchestrator takes turns; a turn spawns a specialist and a checker side by side, calls a leaf tool, or ends. With ``tokens``
each of its calls has token ids, log-probabilities and menus; the others never have.
"""

from __future__ import annotations

import random

from spanloop.schemas.canonical import digest
from spanloop.schemas.events import FeedbackReceived, OrchestrationRevised, Reward, ValueModelPublished
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.orchestration import (
    Agent,
    Edge,
    MenuOption,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
    ToolCall,
)

__all__ = ["make_content", "make_feedback", "make_model", "make_revision", "team_reward"]

BASE_NS = 1_790_000_000_000_000_000
SECOND = 1_000_000_000


class _Builder:
    def __init__(self, seed: int, tokens: bool, tenant: str, branching: bool) -> None:
        self.rng = random.Random(f"content-{seed}")
        self.seed, self.tokens, self.tenant, self.branching = seed, tokens, tenant, branching
        self.trace = digest("trace", seed)
        self.now = BASE_NS + seed * 100 * SECOND
        self.root = Agent(
            digest("agent", seed, 0),
            "orchestrator",
            "orchestrator",
            "",
            self.span("root"),
            self.now,
            self.now,
        )
        self.agents: list[Agent] = []
        self.calls: list[ModelCall] = []
        self.events: list[OrchestrationEvent] = []
        self.edges: list[Edge] = []

    def span(self, *parts: object) -> str:
        return digest("span", self.seed, *(str(p) for p in parts))[:16]

    def event(self, kind: str, agent: Agent, n: object, **fields: object) -> OrchestrationEvent:
        event = OrchestrationEvent(
            id=digest("event", self.seed, kind, str(n)),
            type=kind,
            agent=agent.name,
            t_ns=self.now,
            confidence=1.0,
            rule="synthetic",
            agent_id=agent.id,
            **{"evidence": (self.span(kind, n),), **fields},
        )
        self.events.append(event)
        return event

    def turn(self, k: int, tool: str) -> ModelCall:
        start, self.now = self.now, self.now + SECOND
        words = self.rng.randint(1, 4)
        response = tuple(self.rng.randrange(60, 72) for _ in range(words))
        menus = tuple(self.menu(word) for word in response)
        fields: dict[str, object] = {}
        if self.tokens:
            fields = {
                "prompt_token_ids": tuple(self.rng.randrange(0, 60) for _ in range(13)),
                "response_token_ids": response,
                "logprobs": tuple(
                    next(o.logprob for o in menu if o.token_id == word)
                    for menu, word in zip(menus, response, strict=True)
                ),
                "menus": menus,
                "policy_version": "policy@v3",
                "harness": "h1",
                "task_key": f"task-{self.seed % 3}",
            }
        call = ModelCall(
            id=f"chatcmpl-{digest('call', self.seed, k)}",
            agent_id=self.root.id,
            span_ids=(self.span("chat", k),),
            start_ns=start,
            end_ns=self.now,
            model="policy",
            response_id=f"chatcmpl-{digest('call', self.seed, k)}",
            tool_calls=(ToolCall(f"t{k}", tool),),
            **fields,  # type: ignore[arg-type]
        )
        self.calls.append(call)
        return call

    def menu(self, word: int) -> tuple[MenuOption, ...]:
        options = sorted({word, *(self.rng.randrange(60, 72) for _ in range(self.rng.randint(0, 2)))})
        logprob = -float(len(options) - 1) / 2
        return tuple(MenuOption(option, logprob) for option in options)

    def spawn(self, k: int, call: ModelCall, name: str, n: int) -> None:
        start = self.now
        agent = Agent(
            digest("agent", self.seed, k, name, n),
            name,
            name,
            self.root.id,
            self.span("agent", k, name, n),
            start,
            start + 2 * SECOND,
            status="error" if self.rng.random() < 0.2 else "ok",
        )
        self.agents.append(agent)
        self.event("spawn", self.root, (k, name, n), to=name, to_id=agent.id, call_id=call.id)
        if self.rng.random() < 0.7:
            self.calls.append(
                ModelCall(
                    f"scripted-{self.seed}-{k}-{name}-{n}",
                    agent.id,
                    (self.span("sub", k, name, n),),
                    start,
                    start + SECOND,
                )
            )
        self.event("return", agent, (k, name, n), to="orchestrator", to_id=self.root.id, status=agent.status)

    def build(self) -> OrchestrationContent:
        turns = self.rng.randint(1, 4)
        for k in range(turns):
            kind = self.rng.choice(["spawn", "tool", "end"])
            call = self.turn(k, kind)
            self.event("orchestrator_decision", self.root, k, call_id=call.id)
            if kind == "spawn":
                for n, name in enumerate(["specialist", "checker", *(["helper"] if self.branching else [])]):
                    self.spawn(k, call, name, n)
                self.now += 2 * SECOND
            elif kind == "tool":
                asked = self.event("tool_call", self.root, k, tool="look", call_id=call.id)
                self.now += SECOND
                status = "error" if self.rng.random() < 0.2 else "ok"
                result = self.event(
                    "tool_result", self.root, k, tool="look", status=status, evidence=asked.evidence
                )
                self.edges.append(Edge(asked.id, result.id, "causal"))
        stop = self.event("stop", self.root, "end", status="ok")
        for event in self.events:
            if event.type == "tool_result" and self.rng.random() < 0.7:
                self.edges.append(Edge(event.id, stop.id, "tool_dependency"))
        root = Agent(
            self.root.id,
            "orchestrator",
            "orchestrator",
            "",
            self.root.span_id,
            self.root.started_ns,
            self.now,
        )
        return OrchestrationContent(
            orchestration_id=orchestration_id(self.tenant, [self.trace]),
            tenant=self.tenant,
            trace_ids=(self.trace,),
            events=tuple(sorted(self.events, key=lambda e: (e.t_ns, e.id))),
            edges=tuple(sorted(self.edges, key=lambda e: (e.src, e.dst, e.type))),
            agents=tuple(sorted([root, *self.agents], key=lambda a: (a.started_ns, a.id))),
            calls=tuple(sorted(self.calls, key=lambda c: (c.start_ns, c.id))),
            tokens=TokenUsage(),
            started_ns=root.started_ns,
            ended_ns=self.now,
        )


def make_content(
    seed: int, *, tokens: bool = True, tenant: str = "default", branching: bool = False
) -> OrchestrationContent:
    """An orchestration. ``branching``: three sub-agents side by side instead of two."""
    return _Builder(seed, tokens, tenant, branching).build()


def make_revision(
    content: OrchestrationContent, revision: int = 1, complete: bool = True
) -> OrchestrationRevised:
    """The event that carries a content."""
    return OrchestrationRevised(
        tenant=content.tenant,
        orchestration_id=content.orchestration_id,
        revision=revision,
        complete=complete,
        content=content,
    )


def make_feedback(
    content: OrchestrationContent, n: int = 0, *, kind: str = "trace", **fields: object
) -> FeedbackReceived:
    """Feedback on an orchestration under one of its names."""
    rng = random.Random(f"feedback-{content.orchestration_id}-{n}")
    target = {
        "orchestration": content.orchestration_id,
        "trace": content.trace_ids[0],
        "span": content.calls[0].span_ids[0],
        "response": content.calls[0].response_id,
    }[kind]
    values: dict[str, object] = {
        "feedback_id": f"f-{content.orchestration_id}-{n}",
        "target_kind": kind,
        "target_id": target,
        "value": round(rng.uniform(-1, 1), 6),
        "scorer": "desk",
        "observed_ns": BASE_NS + n,
    }
    return FeedbackReceived(tenant=content.tenant, **{**values, **fields})  # type: ignore[arg-type]


def make_model(version: int, *, tenant: str = "default", contents: int = 12) -> ValueModelPublished:
    """A value model trained a little on synthetic outcomes."""
    from spanloop.pipeline.credit.cast import cast_of
    from spanloop.pipeline.credit.estimates import lessons
    from spanloop.pipeline.credit.value_training import Example, ValueTrainer

    trainer = ValueTrainer.fresh(256)
    rng = random.Random(version)
    examples = [
        Example(
            str(seed),
            tuple(lessons(cast_of(make_content(seed, tokens=seed % 2 == 0)))),
            rng.randrange(-(10**6), 10**6),
        )
        for seed in range(contents)
    ]
    trainer.update(examples, steps=3)
    return ValueModelPublished(
        tenant=tenant,
        version=f"value@v{version}",
        kind=trainer.model.kind,
        trained_on=contents,
        parameters=trainer.model.to_dict(),
    )


def team_reward(rewards: tuple[Reward, ...]) -> int:
    """The composite as a reader computes it from the event alone."""
    return sum(r.weight * r.value // 10**6 for r in rewards if r.unit == "team" and r.value is not None)
