"""Prefix trees: every token keeps its own past, and only that; packed rows give the rows' numbers and gradients."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spanloop.learner.packing import SHARED_MIN, cuts, pack


@st.composite
def forests(draw: st.DrawFn) -> list[np.ndarray]:
    """Rows that branch off earlier ones now and then."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        tail = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
        if rows and draw(st.booleans()):
            base = draw(st.sampled_from(rows))
            rows.append(base[: draw(st.integers(0, len(base)))] + tail)
        else:
            rows.append(draw(st.lists(st.integers(0, 3), min_size=0, max_size=20)) + tail)
    return [np.array(row, np.int64) for row in rows]


@given(forests())
def test_each_token_sees_its_row_and_nothing_else(rows: list[np.ndarray]) -> None:
    packed = pack(rows)
    width = packed.ids_RL.shape[1]
    seen_RLL = packed.seen_RLL()
    ids, positions = packed.ids_RL.ravel(), packed.positions_RL.ravel()
    for row, places in zip(rows, packed.places, strict=True):
        assert ids[places].tolist() == row.tolist()
        assert positions[places].tolist() == list(range(len(row)))
        for at, place in enumerate(places):
            r, here = divmod(int(place), width)
            visible = r * width + np.flatnonzero(seen_RLL[r, here])
            assert visible.tolist() == places[: at + 1].tolist()
    assert seen_RLL.any(2).all(), "a place that sees nothing would be a division by zero"


@given(forests(), st.integers(1, 60))
def test_parts_hold_every_row_once(rows: list[np.ndarray], tokens: int) -> None:
    parts = list(cuts(rows, tokens))
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))


@given(forests())
def test_the_order_of_rows_does_not_matter(rows: list[np.ndarray]) -> None:
    one, other = pack(rows), pack(rows[::-1])
    assert one.ids_RL.tolist() == other.ids_RL.tolist()
    assert [p.tolist() for p in one.places] == [p.tolist() for p in other.places[::-1]] or len(
        {row.tobytes() for row in rows}
    ) < len(rows)


def test_a_conversation_is_computed_once() -> None:
    turns = [np.arange(100 * k) for k in range(1, 9)]
    packed = pack(turns)
    assert packed.size == 800
    assert packed.places[0].tolist() == list(range(100))


def test_short_prefixes_do_not_tie_rows_together() -> None:
    few = SHARED_MIN - 1
    rows = [np.array([*range(few), 50 + k, 60 + k]) for k in range(4)]
    assert pack(rows).size == 4 * (few + 2)
