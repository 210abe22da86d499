"""A deployment's own reward functions: a Python file that its settings name, run once a process."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path

from spanloop.pipeline.rewards.registry import from_file
from spanloop.schemas.errors import ConfigError

__all__ = ["load_functions"]


@lru_cache(maxsize=16)
def load_functions(path: Path) -> str:
    """Run a Python file that registers rewards; returns its hash. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"pipeline.reward_functions: cannot read {path}: {exc.strerror or exc}") from exc
    source = hashlib.sha256(data).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"spanloop_rewards_{source}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"pipeline.reward_functions: {path} is no Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    try:
        with from_file(source):
            spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as exc:
        raise ConfigError(f"pipeline.reward_functions: {path} failed: {type(exc).__name__}: {exc}") from exc
    return source
