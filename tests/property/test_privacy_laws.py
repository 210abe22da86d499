"""1,000 random placements of secrets, with content off and under keys: none is found in what is written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.collectors.sealing import Sealer
from spanloop.pipeline.otlp.decoded import DecodedBatch, Rejected
from spanloop.pipeline.sealing.keys import MemoryKeys
from spanloop.pipeline.sealing.vault import Vault
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import LOG, Span, SpanEvent, SpanLink

PLACEMENTS = 1_000
SECRETS = (
    "pat@example.invalid", "4111 1111 1111 1111", "https://u:secret@example.invalid/?token=abc", "Bearer eyJ.fake.fake",
    "sk-fake-000000", "+1 555 0100 200", "password: hunter2", "078-05-1120", "AKIAABCDEFGHIJKLMNOP", "Mrs <Pat> O'Hara",
    "call me at pat.ohara+x@mail.example", "my card is 4111-1111-1111-1111", "line one\nline two", 'she said "no"',
)  # fmt: skip
KEYS = (
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result", "gen_ai.agent.name", "gen_ai.tool.name", "gen_ai.conversation.id", "input.value", "output.value",
    "llm.input_messages.0.message.content", "llm.input_messages.0.message.role", "user.id", "http.url", "url.full", "metadata",
    "exception.message", "exception.stacktrace", "exception.type", "error.type", "log.body", "db.query.text", "note", "service.name",
    "mlflow.spanInputs", "langfuse.observation.input", "traceloop.entity.input", "mlflow.spanType", "all_messages_events",
    "logfire.msg_template", "logfire.msg", "name", "spanloop.sealed", "spanloop.prompt_token_ids", "spanloop.sdk.act", "spanloop.task.key",
)  # fmt: skip
PLACES = (
    "name",
    "status",
    "scope",
    "version",
    "attribute",
    "key",
    "event",
    "event_name",
    "link",
    "resource",
    "resource_key",
    "log",
    "dead",
)


def _wrapped(secret: str, rng: random.Random) -> Any:
    """The secret alone, in a sentence, in JSON of messages, in a deep value, or as a key."""
    text = rng.choice([secret, f"please {secret} thanks", secret])
    message = {"role": "user", "content": text, "parts": [{"type": "text", "content": text, "name": text}]}
    deep: Any = text
    for _ in range(rng.randrange(1, 12)):
        deep = rng.choice([[deep], {"a": deep}, {text: deep}, json.dumps({"b": deep})])
    return rng.choice(
        [
            text,
            [text],
            {text: 1},
            {"x": {"y": text}},
            json.dumps([message]),
            [message],
            json.dumps(message),
            deep,
        ]
    )


def _placed(secret: str, place: str, rng: random.Random) -> DecodedBatch:
    parts: dict[str, Any] = {"name": "chat m", "attributes": {"gen_ai.operation.name": "chat"}}
    value, key = _wrapped(secret, rng), rng.choice(KEYS)
    rejected: list[Rejected] = []
    match place:
        case "name":
            parts["name"] = rng.choice([secret, f"run {secret}"])
        case "status":
            parts |= {"status": "error", "status_message": f"bad {secret}"}
        case "scope":
            parts["scope"] = secret
        case "version":
            parts["scope_version"] = secret
        case "attribute":
            parts["attributes"][key] = value
        case "key":
            parts["attributes"][secret] = 1
        case "event":
            parts["events"] = (SpanEvent(rng.choice(["exception", "gen_ai.user.message"]), 1, {key: value}),)
        case "event_name":
            parts["events"] = (SpanEvent(secret, 1, {}),)
        case "link":
            parts["links"] = (SpanLink("c" * 32, "d" * 16, {rng.choice([key, secret]): value}),)
        case "resource":
            parts["resource"] = {key: value}
        case "resource_key":
            parts["resource"] = {secret: value}
        case "log":
            parts |= {"kind": LOG, "attributes": {"log.body": value, key: value}}
        case "dead":
            rejected = [Rejected(f"bad {secret}", secret.encode())]
    span = Span("a" * 32, f"{rng.getrandbits(63) + 1:016x}", start_ns=1, end_ns=2, **parts)
    return DecodedBatch([span], rejected)


def _forms(secret: str) -> list[bytes]:
    """As it would stand in JSON, and in JSON inside JSON."""
    once = json.dumps(secret)[1:-1]
    return [once.encode(), json.dumps(once)[1:-1].encode(), secret.encode()]


@pytest.mark.parametrize("keys", [False, True], ids=["content off", "under keys"])
def test_no_secret_is_written_wherever_it_stands(keys: bool) -> None:
    content = Content(training=keys, subject_keys=keys)
    rng = random.Random(18)
    sealer = Sealer(Vault(MemoryKeys()), content.subjects, 65_536) if keys else None
    intake = Intake(Redactor(content, b"k" * 32), 65_536, keep_content=content.clear, sealer=sealer)
    leaks = []
    for n in range(PLACEMENTS):
        secret, place = rng.choice(SECRETS), PLACES[n % len(PLACES)]
        batch = _placed(secret, place, rng)
        written = b"".join(
            r.value + r.key.encode() for r in intake.prepare(batch, tenant="t", source="otlp").records
        )
        if any(form in written for form in _forms(secret)):
            leaks.append((n, place, secret, written[:600]))
    assert leaks == []


def test_the_search_would_find_them() -> None:
    """In the clear every placement is found, but for what is refused."""
    rng = random.Random(18)
    content = Content(training=True)
    intake = Intake(Redactor(content, b"k" * 32), 65_536, keep_content=True)
    found = 0
    for n in range(200):
        secret, place = rng.choice(SECRETS), PLACES[n % len(PLACES)]
        batch = _placed(secret, place, rng)
        written = b"".join(r.value for r in intake.prepare(batch, tenant="t", source="otlp").records)
        found += any(form in written for form in _forms(secret))
    assert found > 150
