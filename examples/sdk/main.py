"""A desk that says outright what it decides: whom it starts, whom it asks, how much is told, whom it believes, and when it stops.

No key and no network beyond 127.0.0.1: the model is a function. Start a receiver first (``spanloop up --workspace my-loop``), then
``python examples/sdk/main.py``; or let OpenTelemetry call ``instrument()``: ``opentelemetry-instrument python examples/sdk/main.py
--zero-code``.
"""

from __future__ import annotations

import queue
import random
import sys
from typing import Any

from spanloop.collectors import sdk

draw = random.Random(2)
ROUNDS_MAX = 3


def choose(**shares: float) -> dict[str, Any]:
    """A draw of a (very small) policy, as the SDK takes it: what was open, how likely each option was, what was drawn."""
    options, propensities = list(shares), list(shares.values())
    chosen = draw.choices(options, propensities)[0]
    return {"options": options, "propensities": propensities, "chosen": chosen, "by_policy": True}


def model(prompt: str) -> str:
    """Stands for a model server."""
    with sdk.model_call("tiny", provider="local", system_prompt="Answer in one word.") as call:
        answer = "yes" if len(prompt) % 2 else "no"
        call.response(
            id=f"resp-{draw.getrandbits(32):08x}", input_tokens=len(prompt.split()), output_tokens=1
        )
    return answer


@sdk.tool
def search(question: str) -> str:
    """Find a page about a question."""
    return f"a page about {question}"


def look_up(name: str, question: str, notes: queue.Queue[Any]) -> str:
    """An agent that looks something up and leaves a note for the critic."""
    with sdk.agent(name):
        page = search(question)
        detail = choose(short=0.5, full=0.5)  # O3: how much to tell
        with sdk.message("critic", **detail) as note:
            notes.put((page if detail["chosen"] == "full" else page[:6], note.carrier))
        return model(page)


def critic(tasks: queue.Queue[Any], notes: queue.Queue[Any], answers: queue.Queue[Any]) -> None:
    """An agent that lives in a thread of its own, started by the desk and asked later."""
    with sdk.agent("critic"):
        while (question := tasks.get()) is not None:
            text, sent = notes.get()
            with sdk.receive(sent):
                answers.put(model(question + text))


def work(question: str) -> str:
    """One ticket: rounds of asking until the policy stops."""
    tasks, notes, answers = queue.Queue(), queue.Queue(), queue.Queue()
    with sdk.agent("desk", task_key=question), sdk.ThreadPool(1) as pool:
        helper, given, asked = None, {}, []
        start = choose(critic=0.8, nobody=0.2)  # O1: whom to start
        if start["chosen"] == "critic":
            with sdk.spawn("critic", **start) as helper:
                pool.submit(critic, tasks, notes, answers)
        else:
            sdk.decision("spawn", **start).now()
        for _ in range(ROUNDS_MAX):
            whom = choose(scout=0.6, scholar=0.4)  # O2: whom to ask
            with sdk.delegate(whom["chosen"], **whom) as act:
                given[whom["chosen"]] = look_up(whom["chosen"], question, notes)
            asked.append(act)
            if helper is not None:
                with sdk.delegate(helper) as act:
                    tasks.put(question)
                    given["critic"] = answers.get()
                asked.append(act)
            more = choose(stop=0.6, again=0.4)  # O5: when to stop
            if more["chosen"] == "stop":
                break
            sdk.decision("stop", **more).now()
        tasks.put(None)
        believed = choose(**{name: 1 / len(given) for name in given})  # O4: whom to believe
        with sdk.aggregate(asked, **believed):
            answer = given[believed["chosen"]]
        sdk.stop("answered", **(more if more["chosen"] == "stop" else {})).now()
        sdk.feedback(1.0 if answer == "yes" else 0.0)
    return answer


if __name__ == "__main__":
    if "--zero-code" not in sys.argv:
        sdk.instrument()
    for ticket in ("tides", "comets", "moss"):
        print(ticket, work(ticket))
    if not sdk.flush_feedback() or sdk.failures():
        print("some telemetry was lost:", sdk.failures(), file=sys.stderr)
