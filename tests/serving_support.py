"""What the tests of gateway and serving share: a small vocabulary, tools, artifacts, settings, a follower of the log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spanloop.learner.policy import PolicyConfig, PolicyNet, save_artifact
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.settings import Settings, load_settings

WORDS = ("red", "green", "blue", "close", "look", "spawn", "a", "b", "c", "short", "full", "true")
TOKENIZER = Tokenizer(WORDS)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """An OpenAI tool; a parameter is a list of values or a schema."""
    properties = {
        k: v if isinstance(v, dict) else {"type": "string", "enum": list(v)} for k, v in parameters.items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }


TOOLS = [tool("close"), tool("look"), tool("spawn", skill=["a", "b", "c"], brief=["short", "full"])]


def chat(model: str = "policy", content: str = "red green", **more: Any) -> dict[str, Any]:
    """A chat request."""
    message = {"role": "user", "content": content}
    return {"model": model, "messages": [message], "tools": TOOLS, "tool_choice": "required", **more}


def net(seed: int) -> PolicyNet:
    """A network that is far from uniform, another for each seed."""
    made = PolicyNet.initial(PolicyConfig(TOKENIZER.size, width=16, heads=2, context=16), seed)
    made.head.weight.data.mul_(40.0)
    return made.eval().requires_grad_(False)


def save_version(workspace: Path, version: int) -> Path:
    """``policy@vN`` in a workspace, with the weights of seed N."""
    folder = workspace / "policies" / f"policy@v{version}"
    save_artifact(folder, net(version), TOKENIZER)
    return folder


def settings_of(workspace: Path, **sections: Any) -> Settings:
    """Settings of a test: own vocabulary, ephemeral ports."""
    flags: dict[str, Any] = {
        "workspace": str(workspace),
        "learner": {"vocabulary": list(WORDS), "width": 16, "heads": 2, "context": 16},
        "gateway": {"port": 0},
        "serving": {"port": 0},
    }
    for name, values in sections.items():
        flags[name] = {**flags[name], **values} if isinstance(flags.get(name), dict) else values
    return load_settings(None, flags)


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The condition's value once it is true; fails after the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not become true in time"
        await asyncio.sleep(0.01)
    return value


def sse(text: str) -> list[dict[str, Any]]:
    """JSON events of a stream; checks that it ends with [DONE]."""
    datas = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]
