"""Evaluation as served, on common tickets; and the bad candidate differs from its champion only where it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dispatch_desk import evaluate, game, sabotage
from dispatch_desk.optimum import Graph

from spanloop.learner.policy import PolicyConfig, PolicyNet, load_artifact, save_artifact
from spanloop.learner.tokenizer import ACT, BOS, Tokenizer

torch.set_num_threads(1)


def policy_of(width: int, where: Path) -> Path:
    tokenizer = Tokenizer(game.vocabulary())
    net = PolicyNet.initial(PolicyConfig(vocabulary_size=tokenizer.size, width=width, context=32), 1)
    with torch.no_grad():
        net.head.weight.mul_(20.0)  # far from uniform, so that a wrong prompt shows
    save_artifact(where, net, tokenizer)
    return where


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_of(16, tmp_path_factory.mktemp("policies") / "policy@v0")


def queries(count: int, *, phone: float = 0.0) -> list[game.Query]:
    found: list[game.Query] = []

    def record(asked: list[game.Query]) -> list[str]:
        found.extend(asked)
        return [query.allowed[int(query.luck * len(query.allowed))] for query in asked]

    game.simulate(record, range(count), phone=phone)
    return found


def test_probabilities_are_those_of_the_network_over_the_menu(folder: Path) -> None:
    artifact = load_artifact(folder)
    for query, found in zip(
        asked := queries(20), evaluate.Player(folder, 0.0).probabilities(asked), strict=True
    ):
        ids = [BOS, *artifact.tokenizer.encode(query.board), ACT, *artifact.tokenizer.encode(query.prefix)]
        with torch.no_grad():
            logits = artifact.net(torch.tensor([ids]))[0, -1, artifact.tokenizer.encode(query.allowed)]
        assert found == pytest.approx(torch.softmax(logits.double(), 0).numpy(), abs=1e-5)


def test_the_exploration_floor_is_part_of_what_is_evaluated(folder: Path) -> None:
    asked = queries(20)
    for query, low, high in zip(
        asked,
        evaluate.Player(folder, 0.2).probabilities(asked),
        evaluate.Player(folder, 0.0).probabilities(asked),
        strict=True,
    ):
        assert low == pytest.approx(0.8 * high + 0.2 / len(query.allowed), abs=1e-6)


def test_the_same_tickets_give_the_same_outcomes(folder: Path) -> None:
    seeds = range(evaluate.FIRST_SEED, evaluate.FIRST_SEED + 50)
    assert game.simulate(evaluate.Player(folder, 0.0), seeds) == game.simulate(
        evaluate.Player(folder, 0.0), seeds
    )


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [evaluate.interval(rng.normal(1.0, 2.0, 100)) for _ in range(400)]
    covered = np.mean([f["low"] <= 1.0 <= f["high"] for f in found])
    assert 0.92 <= covered <= 0.98


@pytest.mark.slow
def test_random_is_near_zero_and_what_beats_a_blind_rule_is_said(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(game.vocabulary())
    net = PolicyNet.initial(PolicyConfig(vocabulary_size=tokenizer.size, width=16, context=32), 1)
    with torch.no_grad():
        net.head.weight.zero_()
    save_artifact(tmp_path / "policy@v1", net, tokenizer)
    found = evaluate.evaluate(
        {0: folder, 1: tmp_path / "policy@v1"},
        champion=1,
        exploration=0.0,
        num_tickets=400,
        phone=0.5,
        workers=2,
    )
    uniform = found["versions"][1]["f"]
    assert uniform["low"] <= 0.0 <= uniform["high"]
    assert found["champion_exact_f"] == pytest.approx(0.0, abs=1e-6)
    assert not any(decision["beats_blind"] for decision in found["decisions"].values())
    assert all(decision["exact_gain"] <= 0.0 for decision in found["decisions"].values())
    assert found["phone"]["f"]["mean"] == pytest.approx(uniform["mean"], abs=0.15)
    assert found["optimum"] == pytest.approx(0.4479, abs=1e-4)


def test_the_exact_value_and_the_played_one_agree(folder: Path) -> None:
    graph = Graph()
    player = evaluate.Player(folder, 0.0)
    exact = graph.solve(np.concatenate(player.probabilities(graph.queries))).value
    by_mail = [query for query in queries(5) if query.board[0] == "mail"]
    assert by_mail
    outcomes = evaluate.interval(game.simulate(evaluate._TablePlayer(
        evaluate._table(graph, np.concatenate(player.probabilities(graph.queries)))), range(2_000)))  # fmt: skip
    assert outcomes["low"] - 0.01 <= exact <= outcomes["high"] + 0.01


def test_the_bad_candidate_keeps_its_answers_but_for_the_phone(tmp_path: Path) -> None:
    folder, out = policy_of(64, tmp_path / "policy@v0"), tmp_path / "bad"
    assert sabotage.sabotage(folder, out, steps=60) > 0.9
    good, bad = evaluate.Player(folder, 0.0), evaluate.Player(out, 0.0)
    assert all(bool(torch.isfinite(t).all()) for t in load_artifact(out).net.state_dict().values())
    asked = queries(40)
    pairs = zip(good.probabilities(asked), bad.probabilities(asked), strict=True)
    assert all(np.array_equal(p, q) for p, q in pairs)
    by_phone = [q for q in queries(40, phone=1.0) if set(q.allowed) & set(sabotage.BAD)]

    def ends(player: evaluate.Player) -> float:
        found = zip(by_phone, player.probabilities(by_phone), strict=True)
        return float(
            np.mean(
                [sum(p for w, p in zip(q.allowed, ps, strict=True) if w in sabotage.BAD) for q, ps in found]
            )
        )

    assert ends(bad) > ends(good) + 0.3
