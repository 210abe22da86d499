"""The decision that an act tells: options, propensities, choice. Checked where it is made, so that a mistake shows in the host's log."""

from __future__ import annotations

from typing import Any

from spanloop.collectors.sdk import _values
from spanloop.collectors.sdk._failures import failed
from spanloop.schemas import sdk_attributes as names

__all__ = ["add_decision"]

MENU_FAILED = "a decision's menu"


def add_decision(
    attributes: dict[str, Any],
    kind: str,
    options: Any,
    propensities: Any,
    chosen: Any,
    *,
    likely: tuple[str, ...] = (),
    by_policy: Any = None,
    state: Any = None,
) -> None:
    """Add a decision's attributes.

    Args:
        likely: what was chosen where ``chosen`` is None: the first of them that is an option, else the first.
        state: what the decider saw: a mapping from names to numbers.
    """
    menu = _values.labels(options, attributes, names.OPTIONS_MAX, names.OPTION_CHARS)
    if chosen is not None:
        choice = _values.label(chosen, attributes, names.OPTION_CHARS)
    else:
        choice = next((name for name in likely if name in menu), likely[0] if likely else "")
    attributes[names.DECISION] = kind
    if choice:
        attributes[names.CHOSEN] = choice
    if menu:
        attributes[names.OPTIONS] = menu
    if state is not None:
        _add_state(attributes, state)
    if isinstance(by_policy, bool):
        attributes[names.BY_POLICY] = by_policy
    if propensities is not None:
        shares = _values.probabilities(propensities, attributes)
        problem = names.menu_problem(tuple(menu), tuple(shares), choice)
        if problem:
            failed(MENU_FAILED, f"propensities are unusable: {problem}")
        attributes[names.PROPENSITIES] = shares
    if not names.is_kind(kind):
        failed(MENU_FAILED, f"a decision is one of {', '.join(names.DECISIONS)}")
    elif choice and menu and choice not in menu:
        failed(MENU_FAILED, "the choice is not among the options")


def _add_state(attributes: dict[str, Any], state: Any) -> None:
    if not isinstance(state, dict):
        attributes[names.TRUNCATED] = True
        return
    if len(state) > names.STATE_MAX:
        attributes[names.TRUNCATED] = True
    listed = list(state.items())[: names.STATE_MAX]
    attributes[names.STATE_NAMES] = _values.labels([name for name, _ in listed], attributes, names.STATE_MAX)
    attributes[names.STATE_VALUES] = _values.probabilities([value for _, value in listed], attributes)
