"""Functions of ours behind macros and views: DuckDB asks Python where SQL would have to repeat what the pipeline defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spanloop.pipeline.macros import ACTIVE_AGENTS, CRITICAL_PATH, POMDP_STEPS
from spanloop.pipeline.views import METRICS

__all__ = ["Function", "register"]


class Function(NamedTuple):
    """What DuckDB needs to know of a function."""

    rows: Callable[..., Any]
    """List of rows, or one."""
    parameters: tuple[str, ...]
    returns: str


def _function(name: str) -> Function:
    """Imported when it is needed: most statements need none."""
    if name == CRITICAL_PATH:
        from spanloop.pipeline.query import critical

        return Function(critical.rows, critical.PARAMETERS, critical.RETURNS)
    if name == METRICS:
        from spanloop.pipeline.query import metric_rows

        return Function(metric_rows.row, metric_rows.PARAMETERS, metric_rows.RETURNS)
    from spanloop.pipeline.query import pomdp_rows

    if name == POMDP_STEPS:
        return Function(pomdp_rows.step_rows, pomdp_rows.PARAMETERS, pomdp_rows.STEPS)
    if name == ACTIVE_AGENTS:
        return Function(pomdp_rows.change_rows, pomdp_rows.PARAMETERS[:1], pomdp_rows.CHANGES)
    raise KeyError(name)


def register(connection: Any, name: str) -> None:
    """Make function ``name`` known, and call it once, so that nothing is imported later, in the sandbox."""
    function = _function(name)
    connection.create_function(name, function.rows, list(function.parameters), function.returns)
    connection.execute(f"SELECT {name}({', '.join('[]' for _ in function.parameters)})")
    connection.fetchall()
