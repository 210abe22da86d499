"""The desk whose LLM is closed: what it asks, how its policy is evaluated, and the bad candidate made of it."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from dispatch_desk import game
from dispatch_desk.decide import CLOSED, DecisionDesk, request_of
from dispatch_desk.evaluate import Player, decision_of, scores_of
from dispatch_desk.optimum import Graph
from dispatch_desk.sabotage_decisions import sabotage
from sdk_support import assembled, recording

from spanloop.learner.decision_features import decision_ids
from spanloop.learner.decision_policy import DecisionConfig, DecisionNet, Scorer
from spanloop.learner.serving.decisions import Asked, answer

CONFIG = DecisionConfig(width=8, buckets=512)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph()


def net(seed: int = 1) -> DecisionNet:
    made = DecisionNet.initial(CONFIG, seed)
    with torch.no_grad():
        made.pairs.weight.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(seed))
    return made


def test_what_is_asked_tells_what_is_worth_telling(graph: Graph) -> None:
    """Boards that ask alike are best answered alike: whoever sees state and menu only loses next to nothing."""
    best = graph.solve()
    worth: dict[object, list[list[float]]] = defaultdict(list)
    for node in random.Random(0).sample(range(len(graph.queries)), 8_000):
        decision, places = decision_of(graph.queries[node])
        edges = best.edge_values[graph.starts[node] : graph.starts[node + 1]]
        worth[decision.state, decision.options, decision.details].append([edges[place] for place in places])
    lost = []
    for found in (np.array(each) for each in worth.values() if len(each) > 1):
        lost += list(found.max(axis=1) - found[:, found.mean(axis=0).argmax()])
    assert len(lost) > 2_000
    assert np.mean(lost) < 0.002


def test_a_player_plays_as_the_server_answers(graph: Graph, tmp_path: Path) -> None:
    net().save(tmp_path / "v", None, {})
    player, scorer = Player(tmp_path / "v", 0.1), Scorer(net())
    queries = random.Random(1).sample(graph.queries, 60)
    for query, found in zip(queries, player.probabilities(queries), strict=True):
        asked = request_of(query.board, query.prefix, query.allowed)
        menu = [item if isinstance(item, str) else SimpleNamespace(**item) for item in asked["menu"]]
        decision, _ = decision_of(query)
        assert np.allclose(scores_of(net(), [decision])[0][: len(menu)], scorer.scores(decision), atol=1e-4)
        assert found.sum() == pytest.approx(1.0)
        assert found.min() >= 0.1 / len(menu) - 1e-9


def test_the_bad_candidate_is_bad_where_the_queue_is_new_and_the_champion_elsewhere(
    graph: Graph, tmp_path: Path
) -> None:
    net().save(tmp_path / "champion", None, {})
    assert sabotage(tmp_path / "champion", tmp_path / "bad") > 0.95
    champion, bad = Player(tmp_path / "champion", 0.0), Player(tmp_path / "bad", 0.0)
    queries = random.Random(2).sample(graph.queries, 2_000)
    gaps = [
        np.abs(a - b).max()
        for a, b in zip(champion.probabilities(queries), bad.probabilities(queries), strict=True)
    ]
    assert np.mean(np.array(gaps) > 1e-6) < 0.02


async def test_a_ticket_is_one_trace_of_three_agents_and_its_decisions(tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []
    scorer = Scorer(net(3))

    async def decide(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(
            {
                **body,
                "traceparent": request.headers["traceparent"],
                "session": request.headers["X-Session-Id"],
            }
        )
        made = Asked(body["kind"], [i if isinstance(i, str) else i["name"] for i in body["menu"]], body["state"],
                     model="policy@v1", seed=str(len(asked)))  # fmt: skip
        decision_ids(made)
        return web.json_response({**answer(made, scorer, 0.5), "fallback": False})

    app = web.Application()
    app.router.add_post("/v1/decide", decide)
    import aiohttp

    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        with recording() as exporter:
            desk = DecisionDesk(session, str(server.make_url("/v1")))
            for number in range(8):
                work = await desk.work(game.new_ticket(random.Random(number)), f"t{number}")
                assert work.ticket.closed
            contents = assembled(exporter)
    assert len(contents) == 8
    assert {str(each["session"]) for each in asked} == {f"t{n}" for n in range(8)}
    traces = {content.trace_ids[0] for content in contents}
    assert {str(each["traceparent"]).split("-")[1] for each in asked} == traces
    agents = {agent.name for content in contents for agent in content.agents}
    assert agents == {"desk", "specialist", "checker"}
    assert {call.model for content in contents for call in content.calls} == {CLOSED}
    assert desk.num_fallbacks == 0
