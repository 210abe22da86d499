"""Grammar of a response: a trie over tool names and enum arguments that says which tokens may follow.

A tool call is generated as words: the tool's name, then one word for each parameter, in the order of the schema's
properties. Invariants: every path from the root to a leaf is one valid tool call; at each node the options are
distinct tokens; equal tools give equal tries. Pure; shared by the server and by tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import SchemaError

__all__ = ["Grammar", "Node", "compile_grammar", "enum_values"]

MAX_NODES = 100_000
"""More nodes than this is refused: the trie is the product of the enums."""


class Node:
    """A place in a response: what may follow (``options``, token ids in menu order) and where each leads."""

    __slots__ = ("children", "fragment", "options")

    def __init__(self, fragment: str) -> None:
        self.fragment = fragment
        """What the token that led here adds to the arguments' JSON (the tool's name at the first level)."""
        self.options: tuple[int, ...] = ()
        self.children: tuple[Node, ...] = ()

    def next(self, token_id: int) -> Node:
        """The node after a token. Raises SchemaError when the token is no option here."""
        try:
            return self.children[self.options.index(token_id)]
        except ValueError:
            raise SchemaError(f"token {token_id} is none of the options {self.options}") from None


class Grammar:
    """The compiled tools of one request. ``max_tokens`` is the length of the longest response."""

    def __init__(self, root: Node, max_tokens: int) -> None:
        self.root = root
        self.max_tokens = max_tokens

    def walk(self, token_ids: Sequence[int]) -> list[Node]:
        """Nodes after each token."""
        nodes: list[Node] = []
        node = self.root
        for token_id in token_ids:
            node = node.next(token_id)
            nodes.append(node)
        return nodes

    def parse(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Tool name and arguments (JSON text) of a complete response. Raises SchemaError when incomplete."""
        nodes = self.walk(token_ids)
        if not nodes or nodes[-1].options:
            raise SchemaError(f"the response {list(token_ids)} is incomplete")
        return nodes[0].fragment, fragments(nodes)


def fragments(nodes: Sequence[Node]) -> str:
    """The arguments' JSON text that the nodes of a response spell."""
    return "".join(node.fragment for node in nodes[1:]) if len(nodes) > 1 else "{}"


def compile_grammar(tools: Any, tool_choice: Any, tokenizer: Tokenizer) -> Grammar:
    """The trie of a request's tools.

    Args:
        tools: OpenAI's ``tools``: ``[{"type": "function", "function": {"name", "parameters"}}]``.
        tool_choice: "required", "auto" (the same here: this policy only calls tools) or one named function.
        tokenizer: Words that can be generated.

    Raises:
        SchemaError: no tools, a parameter that is not an enum, a word outside the vocabulary; names it.
    """
    if not isinstance(tools, list) or not tools:
        raise SchemaError(
            "the embedded server only generates tool calls: give tools and tool_choice 'required'"
        )
    names: list[str] = []
    branches: list[tuple[int, Node]] = []
    wanted = _wanted(tool_choice)
    budget = [MAX_NODES]
    longest = 0
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SchemaError('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
        name = function["name"]
        if name in names:
            raise SchemaError(f"tool {name!r} is given twice")
        names.append(name)
        if wanted is not None and name != wanted:
            continue
        columns = _columns(name, function.get("parameters"), tokenizer)
        first = Node(name)
        _grow(first, columns, 0, budget)
        branches.append((_token(tokenizer, name, f"tool name {name!r}"), first))
        longest = max(longest, 1 + len(columns))
    if not branches:
        raise SchemaError(f"tool_choice names {wanted!r}, which is none of the tools {names}")
    root = Node("")
    root.options = tuple(token for token, _ in branches)
    root.children = tuple(node for _, node in branches)
    return Grammar(root, longest)


def _wanted(tool_choice: Any) -> str | None:
    if tool_choice in (None, "required", "auto"):
        return None
    if isinstance(tool_choice, dict):
        function = tool_choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return function["name"]
    raise SchemaError(
        f"tool_choice {tool_choice!r} is not supported: the embedded server only generates tool calls; use 'required'"
    )


def _token(tokenizer: Tokenizer, word: str, what: str) -> int:
    token = tokenizer.id_of(word)
    if token is None:
        raise SchemaError(f"{what}: the word {word!r} is not in the vocabulary; add it to learner.vocabulary")
    return token


def _columns(tool: str, schema: Any, tokenizer: Tokenizer) -> list[list[tuple[int, str]]]:
    if schema is None:
        return []
    if not isinstance(schema, dict):
        raise SchemaError(f"parameters of tool {tool!r} are not a JSON schema object")
    definitions = schema.get("$defs") or schema.get("definitions") or {}
    columns: list[list[tuple[int, str]]] = []
    for name, value in (schema.get("properties") or {}).items():
        where = f"parameter {name!r} of tool {tool!r}"
        lead = ("{" if not columns else ", ") + json.dumps(name) + ": "
        options: dict[int, str] = {}
        for item in enum_values(value, definitions, where):
            word = item if isinstance(item, str) else json.dumps(item)
            token = _token(tokenizer, word, where)
            if token in options:
                raise SchemaError(f"{where} has two values that are both written {word!r}")
            options[token] = lead + json.dumps(item)
        columns.append(list(options.items()))
    if columns:
        columns[-1] = [(token, text + "}") for token, text in columns[-1]]
    return columns


def _grow(node: Node, columns: list[list[tuple[int, str]]], depth: int, budget: list[int]) -> None:
    if depth == len(columns):
        return
    children: list[Node] = []
    for _, text in columns[depth]:
        budget[0] -= 1
        if budget[0] < 0:
            raise SchemaError(f"the tools open more than {MAX_NODES} responses; use smaller enums")
        children.append(Node(text))
    # Siblings share what follows: the trie is a product, so its tail is grown once.
    _grow(children[0], columns, depth + 1, budget)
    for child in children[1:]:
        child.options, child.children = children[0].options, children[0].children
    node.options = tuple(token for token, _ in columns[depth])
    node.children = tuple(children)


def enum_values(schema: Any, definitions: Mapping[str, Any], where: str, depth: int = 0) -> list[Any]:
    """Values of an enum schema: ``enum``, ``const``, ``anyOf``/``oneOf`` of them, local ``$ref``. Raises SchemaError else."""
    if isinstance(schema, dict) and depth < 16:
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return list(dict.fromkeys(schema["enum"])) if _scalars(schema["enum"]) else _no_enum(where)
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(alternatives, list) and alternatives:
            return [v for part in alternatives for v in enum_values(part, definitions, where, depth + 1)]
        reference = schema.get("$ref")
        if (
            isinstance(reference, str)
            and (target := definitions.get(reference.rsplit("/", 1)[-1])) is not None
        ):
            return enum_values(target, definitions, where, depth + 1)
        if schema.get("type") == "null":
            return [None]
    return _no_enum(where)


def _scalars(values: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, str | int | float | bool) for value in values)


def _no_enum(where: str) -> list[Any]:
    raise SchemaError(f"{where} is not an enum; the embedded server only generates enum arguments")
