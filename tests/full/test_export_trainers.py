"""Data sets load where they are meant for: Hugging Face datasets and TRL, in an environment of their own.

``SPANLOOP_TRL_PYTHON`` names an interpreter that has datasets and trl; skipped without.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from export_world import ExportWorld

from spanloop.pipeline.export.rows import Wish
from spanloop.pipeline.export.source import calls_of, words_of_calls
from spanloop.pipeline.export.write import write_data_set
from spanloop.pipeline.query.session import open_query

PYTHON = os.environ.get("SPANLOOP_TRL_PYTHON", "")
pytestmark = [pytest.mark.full, pytest.mark.skipif(not PYTHON, reason="SPANLOOP_TRL_PYTHON is not set")]

CHECK = """
import sys
from datasets import load_dataset
from trl import is_conversational, maybe_apply_chat_template
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers

plain = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="<unk>")
tokenizer.chat_template = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}\\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
for path, kind in zip(sys.argv[1::2], sys.argv[2::2]):
    rows = load_dataset("parquet" if path.endswith("parquet") else "json", data_files=path, split="train")
    assert len(rows) > 0, path
    for row in rows:
        assert is_conversational(row), row
        example = {k: v for k, v in row.items() if k in ("prompt", "completion", "chosen", "rejected", "label", "messages")}
        if kind == "openai":
            continue
        texts = maybe_apply_chat_template(example, tokenizer)
        assert texts["prompt"].endswith("<|assistant|>"), texts
        if kind == "dpo":
            assert texts["chosen"] != texts["rejected"]
        if kind == "kto":
            assert isinstance(row["label"], bool)
print("ok")
"""


def test_datasets_and_trl_take_every_format(tmp_path: Path) -> None:
    world = ExportWorld(tmp_path / "w", sealed=False)
    world.play(range(24))
    with open_query(world.settings.workspace, timeout_s=300) as query:
        calls = list(calls_of(query, holdout=0.2))
        told = {(c.orchestration_id, c.call_id): words for c, words in words_of_calls(query, calls, None)}
    arguments = []
    for form in ("sft", "weighted", "dpo", "kto"):
        for parquet in (False, True):
            folder = tmp_path / f"{form}{parquet}"
            wish = Wish(form, level="reward" if form == "dpo" else "team", split="all", margin=0.1)
            card = write_data_set(
                folder, wish, calls,
                lambda some: ((c, told[c.orchestration_id, c.call_id]) for c in some), parquet=parquet,
            )  # fmt: skip
            arguments += [str(folder / card.file), form]
    openai = tmp_path / "openai"
    card = write_data_set(
        openai,
        Wish("openai", split="all"),
        calls,
        lambda some: ((c, told[c.orchestration_id, c.call_id]) for c in some),
    )
    arguments += [str(openai / card.file), "openai"]
    done = subprocess.run(
        [PYTHON, "-c", CHECK, *arguments], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("ok")
