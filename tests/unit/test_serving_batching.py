"""Dynamic batching: rows do not feel their neighbours, and a failure stays with its rows."""

import asyncio

import numpy as np
import pytest
import torch
from serving_support import TOKENIZER, TOOLS, net, until

from spanloop.learner.grammar import compile_grammar
from spanloop.learner.serving.batching import Batcher, Row, score_prompts
from spanloop.learner.serving.sampling import behaviour
from spanloop.schemas.errors import TerminalError

GRAMMAR = compile_grammar(TOOLS, "required", TOKENIZER)
PROMPTS = [[1, 5, 3], [1, 5, 6, 7, 3], [1, 7, 6, 3]]


def row(made, prompt, u=0.999, **more):
    return Row(made, prompt, GRAMMAR.root, [u] * GRAMMAR.max_tokens, **more)


def menus(done):
    return [(s.token_id, list(s.menu), list(s.menu_logprobs)) for s in done.steps]


async def run(batcher, rows):
    batcher.start()
    try:
        return await asyncio.gather(*[batcher.submit(r) for r in rows])
    finally:
        await asyncio.to_thread(batcher.close)


async def test_two_versions_in_one_batch_answer_as_alone():
    one, two = net(1), net(2)
    plan = [(made, prompt, u) for made in (one, two) for prompt in PROMPTS for u in (0.1, 0.5, 0.999)]
    together = Batcher(max_batch=32, max_wait_s=0.05)
    batch = await run(together, [row(made, prompt, u) for made, prompt, u in plan])
    assert together.num_rows > together.num_passes >= 2  # they did share passes
    for (made, prompt, u), got in zip(plan, batch, strict=True):
        (alone,) = await run(Batcher(max_batch=1, max_wait_s=0), [row(made, prompt, u)])
        for (token, menu, logs), (token1, menu1, logs1) in zip(menus(got), menus(alone), strict=True):
            assert (token, menu) == (token1, menu1)
            assert logs == pytest.approx(logs1, abs=1e-5)


async def test_the_logprob_is_the_log_of_the_mixture_of_the_networks_logits():
    made = net(3)
    (done,) = await run(
        Batcher(max_batch=4, max_wait_s=0), [row(made, PROMPTS[0], temperature=0.7, exploration=0.2)]
    )
    assert TOKENIZER.decode([s.token_id for s in done.steps])[0] == "spawn"
    ids, node = list(PROMPTS[0]), GRAMMAR.root
    for step in done.steps:
        logits = made(torch.tensor([ids]))[0, -1].numpy()
        mu = behaviour(logits[list(node.options)], temperature=0.7, exploration=0.2)
        assert list(step.menu) == list(node.options)
        assert np.exp(step.menu_logprobs) == pytest.approx(mu, rel=1e-5)
        assert sum(np.exp(step.menu_logprobs)) == pytest.approx(1.0, abs=1e-6)
        assert step.logprob == step.menu_logprobs[step.menu.index(step.token_id)]
        ids.append(step.token_id)
        node = node.next(step.token_id)
    assert done.ids == ids


async def test_forced_words_need_no_pass():
    forced = compile_grammar(
        [
            {
                "type": "function",
                "function": {"name": "look", "parameters": {"properties": {"skill": {"const": "a"}}}},
            }
        ],
        "required",
        TOKENIZER,
    )
    batcher = Batcher(max_batch=4, max_wait_s=0)
    (done,) = await run(batcher, [Row(net(1), PROMPTS[0], forced.root, [])])
    assert TOKENIZER.decode([s.token_id for s in done.steps]) == ["look", "a"]
    assert [(s.logprob, len(s.menu)) for s in done.steps] == [(0.0, 1), (0.0, 1)]
    assert batcher.num_passes == 0


async def test_a_failure_fails_its_rows_and_the_thread_lives():
    class Broken(torch.nn.Module):
        def last_logits(self, *_):
            raise RuntimeError("out of memory")

    batcher = Batcher(max_batch=4, max_wait_s=0)
    batcher.start()
    with pytest.raises(TerminalError, match="out of memory"):
        await batcher.submit(row(Broken(), PROMPTS[0]))
    assert (await batcher.submit(row(net(1), PROMPTS[0]))).steps
    await asyncio.to_thread(batcher.close)
    with pytest.raises(TerminalError, match="not running"):
        await batcher.submit(row(net(1), PROMPTS[0]))


async def test_more_rows_than_the_batch_holds_wait_their_turn():
    batcher = Batcher(max_batch=2, max_wait_s=0)
    done = await run(batcher, [row(net(1), PROMPTS[i % 3]) for i in range(9)])
    assert all(not r.node.options for r in done)
    assert batcher.num_rows / batcher.num_steps <= 2
    await until(lambda: batcher.depth == 0)


def test_scores_are_those_of_the_network():
    made = net(1)
    (score,) = score_prompts(made, [PROMPTS[1]])
    expected = torch.log_softmax(made(torch.tensor([PROMPTS[1]]))[0, :-1], -1)
    torch.testing.assert_close(torch.tensor(score), expected)
