"""Closed word vocabulary of the embedded policy: five specials, then the deployment's words, in the order of the settings.

Place: the embedded server turns chat messages into prompt ids with it, the learner only needs its size and hash.
Invariants: ids are positions, so a vocabulary may grow at its end only with a new policy; one word is one token;
the prompt is ``<bos> WORDS <act>`` with the words of the last message of role ``user`` or ``tool``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["ACT", "BOS", "EOS", "PAD", "SPECIALS", "UNK", "Tokenizer", "message_text"]

SPECIALS = ("<pad>", "<bos>", "<eos>", "<act>", "<unk>")
PAD, BOS, EOS, ACT, UNK = range(5)


class Tokenizer:
    """Words to ids and back.

    >>> t = Tokenizer(["look", "stop"])
    >>> t.encode(["look", "never-seen"]), t.decode([5, 6]), t.size
    ([5, 4], ['look', 'stop'], 7)
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        if not vocabulary:
            raise ConfigError(
                "learner.vocabulary is empty: list the words that prompts, tool names and enum values are made of"
            )
        seen: set[str] = set(SPECIALS)
        for word in vocabulary:
            if not word or word.split() != [word]:
                raise ConfigError(
                    f"learner.vocabulary has {word!r}: a word is not empty and has no white space"
                )
            if word in seen:
                raise ConfigError(f"learner.vocabulary has {word!r} twice or uses a reserved word")
            seen.add(word)
        self.vocabulary = tuple(vocabulary)
        self.words: tuple[str, ...] = (*SPECIALS, *vocabulary)
        self._ids = {word: index for index, word in enumerate(self.words)}
        self.size = len(self.words)
        self.hash = digest("vocabulary", *self.vocabulary)
        """Equal for equal vocabularies; artifacts carry it."""

    def id_of(self, word: str) -> int | None:
        """Id of a word of the vocabulary (no special); None when it is not in it."""
        index = self._ids.get(word)
        return index if index is not None and index >= len(SPECIALS) else None

    def encode(self, words: Sequence[str]) -> list[int]:
        """Ids of words; ``<unk>`` for words (and spellings of specials) that are not in the vocabulary."""
        return [index if (index := self._ids.get(word, UNK)) >= len(SPECIALS) else UNK for word in words]

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Words of ids. Raises SchemaError for an id outside the vocabulary."""
        for index in ids:
            if not 0 <= index < self.size:
                raise SchemaError(f"token id {index} is outside the vocabulary of {self.size}")
        return [self.words[index] for index in ids]

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """``<bos> WORDS <act>`` of the last user or tool message. Raises SchemaError when there is none."""
        for message in reversed(messages):
            if message.get("role") in ("user", "tool"):
                return [BOS, *self.encode(message_text(message).split()), ACT]
        raise SchemaError("no message of role user or tool: the embedded policy answers the last of them")


def message_text(message: Mapping[str, Any]) -> str:
    """Text of a chat message: a string, or the text parts of a list, one a line. Raises SchemaError for other content."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts: list[str] = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise SchemaError(
                    "a message has a part that is not text; the embedded policy reads text only"
                )
            texts.append(text)
        return "\n".join(texts)
    raise SchemaError(f"message content is {type(content).__name__}, expected a text or a list of text parts")
