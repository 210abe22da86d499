"""The tiny base model of the help desk: ``python -m stack.base stack-base``. Random weights; LoRA teaches it."""

from __future__ import annotations

import sys
from pathlib import Path

from stack.tickets import WORDS

from spanloop.learner.tiny_model import build_tiny_model

__all__ = ["main"]


def main() -> None:
    """Write the model, or leave the one that is there."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "stack-base")
    if (folder / "config.json").exists():
        print(f"{folder} is there")
        return
    build_tiny_model(folder, WORDS)
    print(f"{folder}: {len(WORDS)} words")


if __name__ == "__main__":
    main()
