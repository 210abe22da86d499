"""JSON Schema of every event type, for consumers that are not Python.

``python -m spanloop.schemas.jsonschema`` prints one document; with a folder it writes one file an event type.
Records say no version when it is 1, so ``schema_version`` is optional there and required above.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.events import EVENTS, Event

__all__ = ["event_schema", "event_schemas", "write_schemas"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def event_schema(cls: type[Event]) -> dict[str, Any]:
    """JSON Schema (2020-12) of one event type as it stands on the log.

    >>> from spanloop.schemas.events import PolicyPromoted
    >>> event_schema(PolicyPromoted)["properties"]["type"]
    {'enum': ['policy_promoted']}
    """
    (reference,), components = msgspec.json.schema_components([cls], ref_template="#/$defs/{name}")
    name = reference["$ref"].rpartition("/")[2]
    schema = dict(components[name])
    definitions = {key: value for key, value in components.items() if key != name}
    schema["properties"] = {**schema["properties"], "schema_version": {"const": cls.VERSION}}
    if cls.VERSION > 1:
        schema["required"] = [*schema["required"], "schema_version"]
    head = {
        "$schema": _DIALECT,
        "$id": f"spanloop:{cls.__struct_config__.tag}:{cls.VERSION}",
        "x-topic": cls.TOPIC,
    }
    return {**head, **schema, "$defs": definitions} if definitions else {**head, **schema}


def event_schemas() -> dict[str, dict[str, Any]]:
    """JSON Schemas by event type."""
    return {str(cls.__struct_config__.tag): event_schema(cls) for cls in EVENTS}


def write_schemas(folder: Path) -> list[Path]:
    """Write ``TYPE.vN.schema.json`` for each event type and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for cls in EVENTS:
        path = folder / f"{cls.__struct_config__.tag}.v{cls.VERSION}.schema.json"
        path.write_bytes(msgspec.json.format(canonical_json(event_schema(cls)), indent=2) + b"\n")
        paths.append(path)
    return paths


def main(arguments: list[str]) -> None:
    """Print all schemas, or write them to the folder that is named."""
    if arguments:
        write_schemas(Path(arguments[0]))
    else:
        sys.stdout.buffer.write(msgspec.json.format(canonical_json(event_schemas()), indent=2) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
