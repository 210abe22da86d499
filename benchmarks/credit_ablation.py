"""Does credit pay? Orchestrations that a policy needs to reach f = .5, .8 and .9 with the ledger and with team-only credit.

f = (return - random) / (optimum - random), both known exactly. In process and without HTTP, so that thousands of orchestrations take a
minute, but with the system's own parts: the policy is sampled as the embedded server does and its menus and probabilities are
recorded; each ticket becomes an ``OrchestrationContent`` of the shape that assembly gives it; ``signal.estimate_drafts`` and
``finish_draft`` (the batch form of the signal stage) turn it into rewards, ledger and samples; ``ValueTrainer`` learns the critic online;
``Updater`` updates the policy. Everything but the advantage is the same in all arms: tickets, network, loss, optimiser, critic and its schedule.

team        the team's reward, credited to every token of a turn by turn-level GAE with the critic as baseline; lambda is tuned
ledger      each token's own account in the ledger and, less and less, what followed it (credit_trace); the same loss
all_action  the ledger's counterfactual values of the whole menu, in the learner's all-action loss (what the demo uses)

Each arm is tuned over as many configurations on the same tuning seeds; fresh seeds then compare. A run ends at f >= .9 or at the budget; one
that never reaches f counts as "at least the budget". Results of runs go to a JSON lines file; ``--resume`` takes up there.
Run: .venv/bin/python benchmarks/credit_ablation.py [--world desk] [--resume]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import msgspec
import numpy as np
import torch
from _harness import ROOT, write
from credit_ablation_worlds import Case, Desk, Wide, World

from spanloop.learner.batches import Rollout, to_rollout
from spanloop.learner.policy import PolicyConfig, PolicyNet
from spanloop.learner.serving.sampling import behaviour, draw, log_behaviour
from spanloop.learner.tokenizer import ACT, BOS, PAD, Tokenizer
from spanloop.learner.update import Hyper, Updater, exact_numerics
from spanloop.pipeline.credit.asking import Asking
from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimates import lessons
from spanloop.pipeline.credit.states import Encoder, State
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.credit.value_training import Example, ValueTrainer
from spanloop.pipeline.rewards.compose import RewardTerms, compose
from spanloop.pipeline.signal import NO_MODEL, Draft, estimate_drafts, finish_draft
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import FeedbackReceived, Sample, SamplesBuilt
from spanloop.schemas.orchestration import (
    Agent,
    MenuOption,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
    ToolCall,
)
from spanloop.schemas.settings import Settings

LEVELS = (0.5, 0.8, 0.9)
VALUE_EVERY, MEMORY = 64, 2_048
"""The critic of all arms: a version after so many outcomes (value_growth 0), from so many remembered orchestrations (the
pipeline's own 6,144 take longer)."""
BUDGET = {"desk": 8_192, "wide": 4_096}
EVALUATE_EVERY = 512
YARDSTICK = 768
"""Tickets that f is measured on, the same ones each time."""
SECOND = 1_000_000_000
TUNING_SEEDS, SEEDS = (101,), (1, 2, 3, 4, 5)
ARMS = ("team", "all_action", "ledger")


class Config(msgspec.Struct, frozen=True):
    """What is tuned."""

    learning_rate: float
    entropy: float
    """At the start; it falls over half of the budget."""
    gae: float = 1.0
    """lambda of the team arm."""
    exploration: float = 0.1
    """The server's floor at the start; it falls to a fifth over half of the budget."""
    entropy_left: float = 0.1
    """Share of the entropy that is left at the end."""
    epochs: int = 3
    minibatch: int = 32
    batch: int = 128
    """Orchestrations an update."""
    trace: float = 0.0
    """``[pipeline] credit_trace`` of the ledger arm."""
    divergence: str = "reverse"
    """Of the all_action loss."""

    @property
    def label(self) -> str:
        said = msgspec.to_builtins(self)
        usual = {
            "entropy_left": 0.1, "epochs": 3, "minibatch": 32, "batch": 128, "trace": 0.0, "divergence": "reverse"
        }  # fmt: skip
        return ",".join(
            f"{k}={v}" if isinstance(v, str) else f"{k}={v:g}" for k, v in said.items() if usual.get(k) != v
        )


_MENU = Config(2e-3, 0.03, exploration=0.3, entropy_left=0.3, epochs=8, minibatch=16, batch=64)
GRIDS: dict[str, list[Config]] = {
    "team": [
        Config(2e-3, 0.1, gae=0.5),
        Config(2e-3, 0.1, gae=0.25),
        Config(2e-3, 0.1, gae=0.1, epochs=8),
        Config(2e-3, 0.2, gae=0.25, exploration=0.3, epochs=4, minibatch=16),
        Config(1e-3, 0.1, gae=0.25, epochs=8, minibatch=16, batch=64),
        Config(2e-3, 0.3, gae=0.5, epochs=4, minibatch=16),
    ],
    "ledger": [
        Config(2e-3, 0.1, trace=0.9),
        Config(2e-3, 0.1, trace=0.5),
        Config(2e-3, 0.1, trace=0.9, epochs=8),
        Config(2e-3, 0.2, trace=0.9, exploration=0.3, epochs=4, minibatch=16),
        Config(1e-3, 0.1, trace=0.9, epochs=8, minibatch=16, batch=64),
        Config(2e-3, 0.3, trace=0.5, epochs=4, minibatch=16),
    ],
    "all_action": [
        _MENU,
        msgspec.structs.replace(_MENU, learning_rate=1e-3, entropy=0.02),
        msgspec.structs.replace(_MENU, divergence="forward"),
        msgspec.structs.replace(_MENU, epochs=4),
    ],
}
"""In the all-action loss the entropy is a temperature in units of reward; elsewhere it stands beside advantages of root mean square 1."""


# ---------------------------------------------------------------- playing


class Turn(msgspec.Struct):
    """One model call as the server would record it, and what came of it."""

    prompt: tuple[int, ...]
    words: list[str] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    menus: list[tuple[MenuOption, ...]] = []
    workers: tuple[tuple[str, ...], ...] = ()


class Played(msgspec.Struct):
    """A closed ticket."""

    case: Any
    turns: list[Turn]


def play(
    world: World, tokenizer: Tokenizer, net: PolicyNet, seeds: Sequence[str], exploration: float
) -> list[Played]:
    """Work tickets in lockstep; the luck of a policy belongs to the ticket, so equal policies meet equal fates."""
    tickets = [Played(world.new(seed), []) for seed in seeds]
    lucks = [random.Random(f"policy/{seed}") for seed in seeds]
    for ticket in tickets:
        ticket.turns.append(_turn(tokenizer, ticket.case))
    opened = list(range(len(tickets)))
    while opened:
        asked: list[tuple[int, Turn, tuple[str, ...]]] = []
        for index in opened:
            ticket = tickets[index]
            words = _advance(tokenizer, ticket)
            if words:
                asked.append((index, ticket.turns[-1], words))
        opened = [index for index, _, _ in asked]
        if not asked:
            break
        logits = _logits(net, [(*turn.prompt, *turn.tokens) for _, turn, _ in asked])
        for (index, turn, words), row in zip(asked, logits, strict=True):
            ids = tokenizer.encode(words)
            chances = behaviour(row[ids], exploration=exploration)
            chosen = draw(chances, lucks[index].random())
            logs = log_behaviour(chances)
            _say(turn, words[chosen], ids[chosen], logs[chosen], tuple(map(MenuOption, ids, logs)))
    return tickets


def _turn(tokenizer: Tokenizer, case: Case) -> Turn:
    return Turn((BOS, *tokenizer.encode(case.board()), ACT))


def _say(turn: Turn, word: str, token: int, logprob: float, menu: tuple[MenuOption, ...]) -> None:
    turn.words.append(word)
    turn.tokens.append(token)
    turn.logprobs.append(logprob)
    turn.menus.append(menu)


def _advance(tokenizer: Tokenizer, ticket: Played) -> tuple[str, ...]:
    """Go on to the next choice; returns its words, none where the ticket is closed."""
    case = ticket.case
    while True:
        turn = ticket.turns[-1]
        words = case.allowed(turn.words)
        if len(words) > 1:
            return words
        if words:
            (token,) = tokenizer.encode(words)
            _say(turn, words[0], token, 0.0, (MenuOption(token, 0.0),))
            continue
        turn.workers = case.play(turn.words)
        if case.closed:
            return ()
        ticket.turns.append(_turn(tokenizer, case))


def _logits(net: PolicyNet, rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    place: dict[tuple[int, ...], int] = {}
    index = [place.setdefault(row, len(place)) for row in rows]
    longest = max(map(len, place))
    padded = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in place])
    with torch.no_grad():
        return net.last_logits(padded, torch.tensor([len(row) for row in place])).double().numpy()[index]


# ---------------------------------------------------------------- what assembly would have made of it


def content_of(played: Played, name: str, version: int) -> OrchestrationContent:
    """The orchestration of a ticket: entry agent ``desk``, sub-agents that it spawned, leaf tools, calls with token arrays."""
    at = SECOND
    root = f"{name}.desk"
    agents: list[Agent] = []
    calls: list[ModelCall] = []
    events: list[OrchestrationEvent] = []
    for k, turn in enumerate(played.turns):
        call_id, tool = f"{name}.r{k}", turn.words[0]
        calls.append(
            ModelCall(
                call_id, root, (f"{call_id}.s",), at, at + SECOND, response_id=call_id,
                tool_calls=(ToolCall(f"{call_id}.t", tool, "ok"),), policy_version=f"policy@v{version}", harness="desk",
                prompt_token_ids=turn.prompt, response_token_ids=tuple(turn.tokens), logprobs=tuple(turn.logprobs),
                menus=tuple(turn.menus),
            )
        )  # fmt: skip
        at += SECOND
        if turn.workers:
            at = _work(root, call_id, turn, agents=agents, calls=calls, events=events, at=at)
        else:
            span = (f"{call_id}.t",)
            events += (
                OrchestrationEvent(
                    f"{span[0]}/c",
                    "tool_call",
                    "desk",
                    at,
                    1.0,
                    "tool_span",
                    span,
                    root,
                    tool=tool,
                    call_id=call_id,
                ),
                OrchestrationEvent(
                    f"{span[0]}/r",
                    "tool_result",
                    "desk",
                    at,
                    1.0,
                    "tool_span",
                    span,
                    root,
                    tool=tool,
                    status="ok",
                    call_id=call_id,
                ),
            )
        at += SECOND
    events.append(
        OrchestrationEvent(
            f"{root}/e", "stop", "desk", at, 1.0, "end_of_entry_run", (root,), root, status="ok"
        )
    )
    return OrchestrationContent(
        orchestration_id=name, tenant="default", trace_ids=(name,), events=tuple(events), edges=(),
        agents=(Agent(root, "desk", "desk", "", root, 0, at), *agents), calls=tuple(calls), tokens=TokenUsage(),
        started_ns=0, ended_ns=at,
    )  # fmt: skip


def _work(
    root: str,
    call_id: str,
    turn: Turn,
    *,
    agents: list[Agent],
    calls: list[ModelCall],
    events: list[OrchestrationEvent],
    at: int,
) -> int:
    """What the sub-agents of a turn leave behind; returns when the last one is done."""
    for g, group in enumerate(turn.workers):
        for n, role in enumerate(group):
            agent = f"{call_id}.a{g}{n}"
            evidence = (f"{call_id}.t", agent)
            agents.append(Agent(agent, role, role, root, agent, at, at + SECOND))
            calls.append(ModelCall(f"{agent}.c", agent, (f"{agent}.c",), at, at + SECOND, model="script"))
            for kind in ("delegate", "spawn"):
                events.append(
                    OrchestrationEvent(
                        f"{agent}/{kind}",
                        kind,
                        "desk",
                        at,
                        1.0,
                        "agent_under_tool",
                        evidence,
                        root,
                        role,
                        agent,
                        call_id=call_id,
                    )
                )
            events.append(
                OrchestrationEvent(
                    f"{agent}/return",
                    "return",
                    role,
                    at + SECOND,
                    1.0,
                    "agent_under_tool",
                    (agent,),
                    agent,
                    "desk",
                    root,
                    status="ok",
                )
            )
        at += SECOND
    return at


# ---------------------------------------------------------------- credit


class _Remembering(Encoder):
    """An encoder that reads equal states once: tickets pass through the same ones again and again."""

    def __init__(self, units: Sequence[str], words: Sequence[str]) -> None:
        super().__init__(units, words)
        self._states: dict[tuple[tuple[int, ...], tuple[int, ...]], State] = {}

    def __call__(self, prompt: tuple[int, ...], response: Sequence[int]) -> State:
        key = (prompt, tuple(response))
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = super().__call__(prompt, response)
        return state


class Critic:
    """The value model, learned online as the value stage does: after so many outcomes, on a bounded memory."""

    def __init__(self, encoder: Encoder, features: int) -> None:
        self._encoder = encoder
        self._trainer = ValueTrainer.fresh(features, encoder)
        self._memory: list[Example] = []
        self._total = 0
        self.asking: Asking | None = None
        self.model: ValueModel | None = None

    @property
    def version(self) -> str:
        return f"value@v{self._trainer.updates}" if self.asking is not None else NO_MODEL

    def learn(self, drafts: Iterable[Draft]) -> None:
        """Take in what became of orchestrations; publish a version when one is due."""
        for draft in drafts:
            item = tuple(lessons(draft.cast or cast_of(draft.content), self._encoder))
            example = Example(draft.content.orchestration_id, item, draft.composite.team or 0)
            if len(self._memory) < MEMORY:
                self._memory.append(example)
            else:
                self._memory[self._total % MEMORY] = example
            self._total += 1
            if self._total % VALUE_EVERY == 0:
                self._trainer.update(self._memory)
                self.model = ValueModel.from_dict(self._trainer.model.to_dict())
                self.model.encoder = self._encoder
                self.asking = Asking(self.model)


def derived(
    contents: Sequence[OrchestrationContent], outcomes: Sequence[float], critic: Critic, *, settings: Settings
) -> tuple[list[Draft], list[SamplesBuilt]]:
    """``signal.derive`` for a batch: the same numbers, with one prediction for all."""
    terms = RewardTerms.of(settings.pipeline)
    drafts = [
        Draft(
            content,
            compose(content, [feedback_of(content, value)], complete=True, terms=terms),
            critic.version,
        )
        for content, value in zip(contents, outcomes, strict=True)
    ]
    estimate_drafts(drafts, {critic.version: critic.asking} if critic.asking is not None else {})
    built = [finish_draft(draft, True, settings.pipeline).samples for draft in drafts]
    return drafts, [samples for samples in built if samples is not None]


def feedback_of(content: OrchestrationContent, value: float) -> FeedbackReceived:
    """The outcome, sent for the trace."""
    return FeedbackReceived(
        tenant=content.tenant, feedback_id=f"f-{content.orchestration_id}", target_kind="trace",
        target_id=content.trace_ids[0], value=round(value, 6),
    )  # fmt: skip


def turn_value(row: Sample) -> int | None:
    """The critic's value of a turn before its first decision, micro-units; None where it decided nothing, 0 without a critic.

    >>> row = Sample("c", "a", "r", "p@v1", (1,), (2,), (-0.7,), (0,), ("t",), ((2, 3),), ((-0.6931472, -0.6931472),), ((10, 30),))
    >>> turn_value(row)
    20
    """
    at = next((i for i, menu in enumerate(row.menu_ids) if len(menu) > 1), None)
    if at is None:
        return None
    if not row.menu_values:
        return 0
    weights = [math.exp(p) for p in row.menu_logprobs[at]]
    return round(
        math.fsum(w * v for w, v in zip(weights, row.menu_values[at], strict=True)) / math.fsum(weights)
    )


def with_gae(built: SamplesBuilt, decay: float) -> SamplesBuilt:
    """Team-only credit: every token of a turn gets the turn's advantage, sum_l lambda^l delta_{k+l} (METHODS 3.2 i, gamma 1)."""
    values = [turn_value(row) for row in built.rows]
    following, advantage = built.reward, 0.0
    rows: list[Sample] = []
    for row, value in zip(reversed(built.rows), reversed(values), strict=True):
        if value is not None:
            advantage = following - value + decay * advantage
            following = value
        rows.append(
            msgspec.structs.replace(
                row, advantages=(round(advantage),) * len(row.response_token_ids), menu_values=()
            )
        )
    return msgspec.structs.replace(built, rows=tuple(reversed(rows)))


# ---------------------------------------------------------------- a run


class Run:
    """One arm, configuration and seed."""

    def __init__(self, world: World, arm: str, config: Config, seed: int) -> None:
        self.world, self.arm, self.config, self.seed = world, arm, config, seed
        self.tokenizer = Tokenizer(world.words)
        shape = PolicyConfig(vocabulary_size=self.tokenizer.size, context=world.context)
        self.updater = Updater(PolicyNet.initial(shape, seed))
        credit = "team" if arm == "team" else "ledger"
        pipeline = {"holdout": 0.0, "credit": credit, "credit_trace": config.trace}
        self.settings = Settings.model_validate({"pipeline": pipeline})
        encoder = _Remembering(world.units, self.tokenizer.words if world.units else ())
        self.critic = Critic(encoder, self.settings.pipeline.value_features)
        self.updates = 0
        updates = BUDGET[world.name] // config.batch // 2
        self.hyper = Hyper(
            seed=seed, learning_rate=config.learning_rate, epochs=config.epochs, minibatch_orchestrations=config.minibatch, clip=0.2,
            entropy_start=config.entropy, entropy_end=config.entropy * config.entropy_left, entropy_updates=updates,
            advantage="all_action" if arm == "all_action" else "ledger", exploration=0.0, max_staleness=4,
            divergence=config.divergence,
        )  # fmt: skip
        self._decay_updates = updates
        self._yardstick = [f"yardstick/{n}" for n in range(YARDSTICK)]
        cases = [world.new(name) for name in self._yardstick]
        self._easier = statistics.fmean(map(world.root_value, cases)) - world.optimum

    def step(self) -> None:
        """One batch of tickets through everything."""
        start, done = self.config.exploration, min(1.0, self.updates / self._decay_updates)
        exploration = start * 0.2**done
        first = self.played
        seeds = [f"{self.seed}/{first + n}" for n in range(self.config.batch)]
        played = play(self.world, self.tokenizer, self.updater.net, seeds, exploration)
        contents = [
            content_of(p, digest("ticket", s), self.updates) for p, s in zip(played, seeds, strict=True)
        ]
        drafts, built = derived(
            contents, [p.case.outcome() for p in played], self.critic, settings=self.settings
        )
        rollouts = [self.rollout(samples) for samples in built]
        self.critic.learn(drafts)
        self.updates += 1
        self.updater.train(rollouts, self.hyper, self.updates)

    def rollout(self, built: SamplesBuilt) -> Rollout:
        """The training example with this arm's advantage."""
        samples = with_gae(built, self.config.gae) if self.arm == "team" else built
        made = to_rollout(samples, vocabulary_size=self.tokenizer.size, context=self.world.context)
        if isinstance(made, Rollout):
            return made
        raise RuntimeError(f"{built.orchestration_id} was refused: {made}")

    @property
    def played(self) -> int:
        """Orchestrations so far."""
        return self.updates * self.config.batch

    def measure(self) -> float:
        """f of the present policy, without exploration, on the yardstick's tickets."""
        played = play(self.world, self.tokenizer, self.updater.net, self._yardstick, 0.0)
        value = statistics.fmean(p.case.expected for p in played) - self._easier
        return (value - self.world.random) / (self.world.optimum - self.world.random)


_WORLDS: dict[str, World] = {}


def world_of(name: str) -> World:
    """A world, made once a process."""
    if name not in _WORLDS:
        _WORLDS[name] = Desk() if name == "desk" else Wide()
    return _WORLDS[name]


def needed(curve: Sequence[tuple[int, float]], level: float) -> int | None:
    """Orchestrations at the first measurement at or above ``level``, with a straight line between measurements; None: never.

    >>> needed([(0, 0.0), (100, 0.4), (200, 0.6)], 0.5)
    150
    """
    previous = (0, 0.0)
    for count, f in curve:
        if f >= level:
            return round(
                previous[0] + (count - previous[0]) * (level - previous[1]) / max(1e-9, f - previous[1])
            )
        previous = (count, f)
    return None


def work(key: tuple[str, str, Config, int]) -> dict[str, Any]:
    """One run, until the highest level or the budget."""
    name, arm, config, seed = key
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 100)
    started = time.process_time()
    run = Run(world_of(name), arm, config, seed)
    curve: list[tuple[int, float]] = [(0, run.measure())]
    with exact_numerics():
        while run.played < BUDGET[name] and curve[-1][1] < LEVELS[-1]:
            run.step()
            if run.played % EVALUATE_EVERY == 0:
                curve.append((run.played, run.measure()))
    return {
        "world": name, "arm": arm, "config": config.label, "seed": seed,
        "needed": {f"{level:g}": needed(curve, level) for level in LEVELS},
        "best": round(max(f for _, f in curve), 4), "curve": [(n, round(f, 4)) for n, f in curve],
        "cpu_s": round(time.process_time() - started, 1),
    }  # fmt: skip


# ---------------------------------------------------------------- the comparison


def best_config(runs: Sequence[dict[str, Any]], budget: int) -> str:
    """The label with the fewest orchestrations to f = .8 (geometric mean over seeds; the budget where it was not reached); of equals, none of
    which got there, the one that came closest."""
    labels = list(dict.fromkeys(run["config"] for run in runs))

    def cost(label: str) -> tuple[float, float]:
        mine = [run for run in runs if run["config"] == label]
        needed_ = statistics.fmean(math.log(max(1, run["needed"]["0.8"] or budget)) for run in mine)
        return needed_, -statistics.fmean(run["best"] for run in mine)

    return min(labels, key=cost)


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t by number of pairs."""


def compare(ours: Sequence[dict[str, Any]], team: Sequence[dict[str, Any]], budget: int) -> dict[str, Any]:
    """Ratio of orchestrations ours / team for each level: geometric mean over paired seeds with 95 % intervals, by bootstrap over
    the seeds and by Student's t on the logarithms, which so few seeds need.

    A run that never got there counts as the budget. Where only team runs are censored the true ratio is at most what is
    stated (``at_most``); where one of ours is, nothing is claimed. ``better``: the whole of both intervals lies below 1.
    """
    found: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    by_seed = {run["seed"]: run for run in team}
    pairs = [(run, by_seed[run["seed"]]) for run in ours if run["seed"] in by_seed]
    for level in (f"{x:g}" for x in LEVELS):
        mine = [a["needed"][level] for a, _ in pairs]
        theirs = [b["needed"][level] for _, b in pairs]
        logs = np.array([math.log((a or budget) / (b or budget)) for a, b in zip(mine, theirs, strict=True)])
        mean = float(logs.mean())
        resampled = np.quantile(
            logs[rng.integers(0, len(logs), (20_000, len(logs)))].mean(axis=1), [0.025, 0.975]
        )
        half = (
            STUDENT[len(logs)] * float(logs.std(ddof=1)) / math.sqrt(len(logs))
            if len(logs) in STUDENT
            else math.inf
        )
        claimed = not mine.count(None)
        found[level] = {
            "ours": mine, "team": theirs, "ratio": round(math.exp(mean), 3),
            "bootstrap": [round(math.exp(x), 3) for x in resampled.tolist()],
            "student": [round(math.exp(mean - half), 3), round(math.exp(min(700.0, mean + half)), 3)],
            "ours_censored": mine.count(None), "team_censored": theirs.count(None),
            "at_most": claimed and theirs.count(None) > 0,
            "better": claimed and bool(resampled[1] < 0.0) and mean + half < 0.0,
        }  # fmt: skip
    return found


class Ledger:
    """Finished runs, in a JSON lines file."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = []
        if resume and path.exists():
            self.runs = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            path.unlink(missing_ok=True)

    def find(self, key: tuple[str, str, Config, int]) -> dict[str, Any] | None:
        name, arm, config, seed = key
        wanted = (name, arm, config.label, seed)
        return next((r for r in self.runs if (r["world"], r["arm"], r["config"], r["seed"]) == wanted), None)

    def complete(self, keys: Sequence[tuple[str, str, Config, int]], workers: int) -> list[dict[str, Any]]:
        """Runs of all ``keys``, those that are missing worked now."""
        missing = [key for key in keys if self.find(key) is None]
        if workers <= 1 or len(missing) <= 1:
            for run in map(work, missing):
                self._add(run)
        else:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                for run in pool.map(work, missing):
                    self._add(run)
        return [run for key in keys if (run := self.find(key)) is not None]

    def _add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        with self._path.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(f"{run['world']} {run['arm']} {run['config']} seed {run['seed']}: {run['needed']}, best {run['best']}, {run['cpu_s']} s", flush=True)  # fmt: skip


def table(figures: dict[str, Any], ledger: Ledger) -> str:
    """The result as in docs/credit_ablation.md."""
    lines: list[str] = []
    for name, found in figures.items():
        lines += [
            "",
            f"*{name}*",
            "",
            "| arm | f = .5 | ratio | f = .8 | ratio | f = .9 | ratio |",
            "|---|---|---|---|---|---|---|",
        ]
        for arm, label in found["chosen"].items():
            runs = [
                r
                for r in ledger.runs
                if (r["world"], r["arm"], r["config"]) == (name, arm, label) and r["seed"] in SEEDS
            ]
            cells = [f"{arm}"]
            for level in (f"{x:g}" for x in LEVELS):
                cells.append(
                    ", ".join(str(r["needed"][level] or "–") for r in sorted(runs, key=lambda r: r["seed"]))
                )
                ratio = found["against_team"].get(arm, {}).get(level)
                cells.append("" if ratio is None else _said(ratio))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _said(ratio: dict[str, Any]) -> str:
    if ratio["ours_censored"]:
        return f"no claim: {ratio['ours_censored']} of ours censored"
    (low, high), (least, most) = ratio["bootstrap"], ratio["student"]
    most_ = "at most " if ratio["at_most"] else ""
    return f"{most_}{ratio['ratio']:.2f}, {low:.2f}–{high:.2f} / {least:.2f}–{most:.2f}{', better' if ratio['better'] else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=("desk", "wide"), action="append")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--tuning-seeds", type=int, default=len(TUNING_SEEDS))
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "benchmarks" / "results" / "credit_ablation.runs.jsonl"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tune-only", action="store_true")
    parser.add_argument("--one", help="ARM:INDEX:SEED: a single run with its curve, no file")
    options = parser.parse_args()
    names = options.world or ["desk", "wide"]
    if options.one:
        arm, index, seed = options.one.split(":")
        print(json.dumps(work((names[0], arm, GRIDS[arm][int(index)], int(seed)))))
        return
    ledger = Ledger(options.runs, options.resume)
    arms = options.arms.split(",")
    figures: dict[str, Any] = {}
    for name in names:
        fresh: dict[str, list[dict[str, Any]]] = {}
        tuning: dict[str, list[dict[str, Any]]] = {}
        chosen: dict[str, str] = {}
        for arm in arms:
            grid = GRIDS[arm]
            keys = [(name, arm, c, s) for c in grid for s in TUNING_SEEDS[: options.tuning_seeds]]
            tuned = ledger.complete(keys, options.workers)
            chosen[arm] = best_config(tuned, BUDGET[name])
            tuning[arm] = [{k: run[k] for k in ("config", "seed", "needed", "best")} for run in tuned]
            if options.tune_only:
                continue
            config = next(c for c in grid if c.label == chosen[arm])
            fresh[arm] = ledger.complete(
                [(name, arm, config, s) for s in SEEDS[: options.seeds]], options.workers
            )
        if options.tune_only:
            continue
        world = world_of(name)
        figures[name] = {
            "agents": world.agents, "optimum": round(world.optimum, 4), "random": round(world.random, 4),
            "budget": BUDGET[name], "tuning": tuning,
            "chosen": chosen,
            "against_team": {arm: compare(fresh[arm], fresh["team"], BUDGET[name]) for arm in arms if arm != "team"},
            "best_f": {arm: [run["best"] for run in runs] for arm, runs in fresh.items()},
        }  # fmt: skip
    if figures:
        print(table(figures, ledger))
        write(
            "credit_ablation",
            f".venv/bin/python {' '.join(['benchmarks/credit_ablation.py', *sys.argv[1:]])}",
            figures,
        )


if __name__ == "__main__":
    main()
