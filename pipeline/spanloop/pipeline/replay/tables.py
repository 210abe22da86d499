"""A comparison of two replays as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spanloop.pipeline.replay.diff import Diff, Side

__all__ = ["lines"]

_SHOWN = {"only_a": "only in A", "only_b": "only in B"}


def lines(found: Diff) -> list[str]:
    """What ``spanloop diff`` prints."""
    text = [f"A {_side(found.a)}", f"B {_side(found.b)}"]
    erased = (
        f"{found.erased:,} without their token ids on one side: credit and samples of these are not compared"
    )
    if found.equal:
        return [
            *text,
            f"all {found.same:,} orchestrations are equal",
            *([f"  {erased}"] if found.erased else []),
        ]
    parts = [f"{found.same:,} equal"]
    parts += [f"{count:,} with other {what}" for what, count in found.changed.items()]
    parts += [f"{count:,} {_SHOWN[name]}" for name in ("only_a", "only_b") if (count := getattr(found, name))]
    text.append("orchestrations: " + ", ".join(parts))
    text += [f"  {erased}"] if found.erased else []
    changed = [(edge, count) for edge, count in found.histogram if count]
    if changed:
        most = max(count for _, count in changed)
        text += ["", "change of the team's reward, at least      orchestrations"]
        text += [
            f"  {edge:>10.6f}  {count:>12,}  {'#' * max(1, round(30 * count / most))}"
            for edge, count in changed
        ]
    text += _table(
        "largest changes",
        ("orchestration", "changed", "A", "B"),
        [(x.orchestration_id, ", ".join(_SHOWN.get(w, w) for w in x.what), _number(x.before), _number(x.after))
         for x in found.orchestrations],
    )  # fmt: skip
    text += _table(
        "credit by account",
        ("unit", "accounts", "changed", "other sign", "sum A", "sum B"),
        [(x.unit, f"{x.accounts:,}", f"{x.changed:,}", f"{x.flipped:,}", _number(x.before), _number(x.after)) for x in found.units],
    )  # fmt: skip
    text += _table(
        "agents",
        ("unit", "name", "changed", "other sign", "sum A", "sum B"),
        [(x.unit, x.label, f"{x.changed:,}", f"{x.flipped:,}", _number(x.before), _number(x.after)) for x in found.agents],
    )  # fmt: skip
    text += _table(
        "decisions",
        ("orchestration", "account", "what", "A", "B"),
        [
            (x.orchestration_id, x.account, x.label, _number(x.before), _number(x.after))
            for x in found.decisions
        ],
    )
    text += _table(
        "what the learner would be taught",
        ("role", "rows", "added", "removed", "tokens", "changed", "other sign", "mean A", "mean B"),
        [
            (x.role, f"{x.rows:,}", f"{x.added:,}", f"{x.removed:,}", f"{x.tokens:,}", f"{x.changed:,}", f"{x.flipped:,}",
             _number(x.before), _number(x.after))
            for x in found.taught
        ],
    )  # fmt: skip
    if found.holdout_moved:
        text.append(f"  {found.holdout_moved:,} orchestrations move into or out of the holdout")
    return text


def _side(side: Side) -> str:
    own = f"{side.name}: {side.orchestrations:,} orchestrations, {side.credited:,} credited"
    under = f", reward definitions {' '.join(side.definitions)}" if side.definitions else ""
    return f"{own}, team rewards sum to {side.team:+.3f}, models {side.models}{under}"


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:+.6f}"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rows = [tuple(row) for row in rows]
    if not rows:
        return []
    widths = [max(len(row[i]) for row in (tuple(head), *rows)) for i in range(len(head))]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    shown = [
        "  " + "  ".join(f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in (tuple(head), *rows)
    ]  # fmt: skip
    return ["", title, *shown]


def _is_number(text: str) -> bool:
    return text == "missing" or text.lstrip("+-").replace(",", "").replace(".", "").isdigit()
