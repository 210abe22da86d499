"""Settings as text: an example TOML with every setting's meaning, and the resolved values with their origin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from spanloop.schemas.settings import Credential, JudgeTerm, Settings, origins

__all__ = ["MASK", "example", "resolved"]

MASK = "********"
"""Stands for a secret that is set."""
_JUDGE = {
    "name": "clarity/1", "url": "http://127.0.0.1:8000/v1", "model": "judge-7b", "channel": "clarity",
    "rubric": "Is what the agent hands back clear and complete?",
}  # fmt: skip
"""Of the example, what has no default."""
_SECRET = re.compile(r"password|secret|token|credential|jaas|\.pem$|\.config$", re.IGNORECASE)
"""Properties of foreign clients that may hold one."""


def example() -> str:
    """A TOML file in which every setting stands as a comment with its default and its meaning."""
    lines = [
        "# Settings of spanloop. Every line that begins with #name shows a default: remove the # to change it.",
        "# Environment variables win: SPANLOOP_WORKSPACE=..., SPANLOOP_COLLECTOR__PORT=4319",
        "",
    ]
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections.append((name, field.annotation))
        elif name not in ("credentials", "judges"):
            lines += _setting(name, field)
    for name, model in sections:
        lines += ["", f"[{name}]", *(f"# {line}" for line in _own_doc(model))]
        for key, field in model.model_fields.items():
            lines += _setting(key, field)
    lines += ["", "# Keys of clients; without any, only this machine may connect.", "#[[credentials]]"]
    for key, field in Credential.model_fields.items():
        lines += [f"# {line}" for line in (field.description or "").splitlines()]
        value = "long-random-text" if key == "key" else "agent" if field.is_required() else field.default
        lines.append(f"#{key} = {_toml(value)}")
    lines += ["", *(f"# {line}" for line in _own_doc(JudgeTerm)), "#[[judges]]"]
    for key, field in JudgeTerm.model_fields.items():
        lines += [f"# {line.strip()}" for line in (field.description or "").splitlines()]
        lines.append(f"#{key} = {_toml(_JUDGE.get(key, field.default))}")
    return "\n".join(lines) + "\n"


def _own_doc(model: type[BaseModel]) -> list[str]:
    doc = model.__dict__.get("__doc__") or ""
    return [line.strip() for line in doc.strip().splitlines() if line.strip()]


def _setting(name: str, field: FieldInfo) -> Iterator[str]:
    for line in (field.description or "").splitlines():
        yield f"# {line.strip()}"
    bounds = _bounds(field)
    if bounds:
        yield f"# {bounds}"
    yield f"#{name} = {_toml(field.default)}"


def _bounds(field: FieldInfo) -> str:
    """Limits of a value in words."""
    found: dict[str, Any] = {}
    for item in field.metadata:
        for name in ("ge", "gt", "le", "lt", "pattern"):
            value = getattr(item, name, None)
            if value is not None:
                found[name] = value
    if "pattern" in found:
        choices = re.fullmatch(r"\^\(([\w|]+)\)\$", found["pattern"])
        return f"One of {', '.join(choices[1].split('|'))}." if choices else f"Matches {found['pattern']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(f"{words[name]} {value}" for name, value in found.items())


def _toml(value: Any) -> str:
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def resolved(settings: Settings, path: Path | None) -> list[dict[str, Any]]:
    """Every setting as {"setting", "value", "origin"}, secrets masked.

    Args:
        settings: as loaded.
        path: the file they were loaded from.
    """
    where = origins(path)
    return [
        {"setting": dotted, "value": _shown(value), "origin": where.get(dotted, "default")}
        for dotted, value in _walk(settings, "")
    ]


def _walk(model: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    if isinstance(value, BaseModel):
        return {name: _shown(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple | list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):  # of librdkafka: sasl.password, ssl.key.pem, ...
        return {key: MASK if _SECRET.search(key) else _shown(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value
