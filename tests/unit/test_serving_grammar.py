"""The grammar: what can be generated is exactly the set of valid tool calls."""

import itertools
import json
import random
from typing import Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_support import TOKENIZER, TOOLS, WORDS, tool

from spanloop.learner.grammar import compile_grammar, enum_values
from spanloop.learner.tokenizer import ACT, BOS, UNK, Tokenizer
from spanloop.schemas.errors import ConfigError, SchemaError


def all_paths(node, prefix=()):
    if not node.options:
        yield prefix
    for token, child in zip(node.options, node.children, strict=True):
        yield from all_paths(child, (*prefix, token))


names = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True)
columns = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True), max_size=3)
tools_of = names.flatmap(
    lambda chosen: st.tuples(*[columns for _ in chosen]).map(
        lambda all_columns: [
            tool(name, **{f"p{i}": values for i, values in enumerate(columns)})
            for name, columns in zip(chosen, all_columns, strict=True)
        ]
    )
)


@given(tools_of, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_sampled_words_always_parse_back_into_a_valid_call(tools, rng: random.Random):
    grammar = compile_grammar(tools, "required", TOKENIZER)
    node, ids = grammar.root, []
    while node.options:
        assert len(set(node.options)) == len(node.options)
        token = rng.choice(node.options)
        ids.append(token)
        node = node.next(token)
    name, arguments = grammar.parse(ids)
    schema = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == name)
    values = json.loads(arguments)
    jsonschema.validate(values, schema)
    assert set(values) == set(schema["properties"])
    assert TOKENIZER.decode(ids) == [name, *values.values()]
    assert len(ids) <= grammar.max_tokens


@given(tools_of)
@settings(max_examples=30)
def test_every_call_has_exactly_one_path(tools):
    grammar = compile_grammar(tools, "required", TOKENIZER)
    calls = [grammar.parse(path) for path in all_paths(grammar.root)]
    expected = [
        (t["function"]["name"], dict(zip(t["function"]["parameters"]["properties"], values, strict=True)))
        for t in tools
        for values in itertools.product(
            *[p["enum"] for p in t["function"]["parameters"]["properties"].values()]
        )
    ]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
    assert grammar.max_tokens == max(len(path) for path in all_paths(grammar.root))


def test_incomplete_and_foreign_responses_are_refused():
    grammar = compile_grammar(TOOLS, "required", TOKENIZER)
    (spawn,) = TOKENIZER.encode(["spawn"])
    for ids in ([], [spawn], [TOKENIZER.id_of("red")]):
        with pytest.raises(SchemaError):
            grammar.parse(ids)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["a", "b", "a"]}, ["a", "b"]),
        ({"const": "a"}, ["a"]),
        ({"anyOf": [{"const": "a"}, {"enum": ["b", "c"]}]}, ["a", "b", "c"]),
        ({"oneOf": [{"const": "a"}, {"type": "null"}]}, ["a", None]),
        ({"$ref": "#/$defs/Skill"}, ["b"]),
        ({"enum": [True, 3]}, [True, 3]),
    ],
)
def test_the_forms_that_an_enum_takes(schema, values):
    assert enum_values(schema, {"Skill": {"enum": ["b"]}}, "p") == values


def test_literals_as_pydantic_writes_them():
    from pydantic_ai import Tool

    def spawn(skill: Literal["a", "b"], brief: Literal["short"], sure: Literal[True]) -> None: ...

    schema = Tool(spawn).function_schema.json_schema
    grammar = compile_grammar(
        [{"type": "function", "function": {"name": "spawn", "parameters": schema}}], "auto", TOKENIZER
    )
    ids = TOKENIZER.encode(["spawn", "b", "short", "true"])
    assert json.loads(grammar.parse(ids)[1]) == {"skill": "b", "brief": "short", "sure": True}


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([], "required", "only generates tool calls"),
        (TOOLS, "none", "only generates tool calls"),
        ([tool("spawn", note={"type": "string"})], "required", "'note' of tool 'spawn' is not an enum"),
        ([tool("spawn", note={"enum": [["a"]]})], "required", "not an enum"),
        ([tool("spawn", skill=["a", "zebra"])], "required", "'zebra' is not in the vocabulary"),
        ([tool("fly")], "required", "'fly' is not in the vocabulary"),
        ([tool("<act>")], "required", "not in the vocabulary"),
        ([tool("look"), tool("look")], "required", "twice"),
        ([tool("look", sure={"enum": ["true", True]})], "required", "both written"),
        (TOOLS, {"type": "function", "function": {"name": "fly"}}, "none of the tools"),
        (
            [tool("look", **{f"p{i}": list("abc") for i in range(3)})] * 1 + [{"type": "x"}],
            "required",
            "a tool is",
        ),
    ],
)
def test_refusals_name_what_is_wrong(tools, choice, says):
    with pytest.raises(SchemaError, match=says):
        compile_grammar(tools, choice, TOKENIZER)


def test_a_long_product_stays_small():
    wide = [tool("look", **{f"p{i}": list("abc") for i in range(40)})]
    grammar = compile_grammar(wide, "required", TOKENIZER)  # 3^40 calls, 120 nodes
    assert grammar.max_tokens == 41


def test_one_named_tool():
    choice = {"type": "function", "function": {"name": "spawn"}}
    assert compile_grammar(TOOLS, choice, TOKENIZER).root.options == (TOKENIZER.id_of("spawn"),)


def test_prompts_are_the_last_user_or_tool_message():
    messages = [
        {"role": "system", "content": "blue"},
        {"role": "user", "content": "red"},
        {"role": "assistant", "content": None},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "green  zebra"}, {"type": "text", "text": "<act>"}],
        },
        {"role": "assistant", "content": "blue"},
    ]
    assert TOKENIZER.prompt_ids(messages) == [BOS, TOKENIZER.id_of("green"), UNK, UNK, ACT]
    with pytest.raises(SchemaError, match="no message of role user"):
        TOKENIZER.prompt_ids(messages[:1])
    with pytest.raises(SchemaError, match="text only"):
        TOKENIZER.prompt_ids([{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize("words", [[], ["a", "a"], ["a b"], [""], ["<pad>"]])
def test_vocabularies_that_are_refused(words):
    with pytest.raises(ConfigError, match="vocabulary"):
        Tokenizer(words)
