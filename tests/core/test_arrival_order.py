"""Who would have had a place by now in order of arrival: against counting it anew each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.core.arrival_order import ArrivalOrder

moves = st.lists(st.tuples(st.sampled_from(["join", "join", "take", "pass", "leave"]), st.integers(0, 30)), max_size=80)


@given(moves)
def test_whoever_is_named_is_among_the_first_as_many_as_have_got_a_place(plan):
    """`taken`, `left`: numbers in order of arrival of those that had a place, and that left or passed without one."""
    order = ArrivalOrder()
    waiting, taken, left, named = [], set(), set(), set()
    rows, arrived = {}, 0
    for move, which in plan:
        if move == "join":
            row = next(row for row in range(200) if row not in rows.values())  # rows are used again
            rows[arrived] = row
            waiting.append(arrived)
            order.join(row)
            arrived += 1
        elif waiting:
            number = waiting.pop(which % len(waiting))
            row = rows.pop(number)
            if move == "take":
                taken.add(number)
                assert order.take(row)
                assert not order.take(row), "its first place is its only one"
                back = order.advance()
                if back is not None:
                    named |= {number for number, row in rows.items() if row == back}
            else:
                order.leave(row)
                if number not in named:
                    left.add(number)
        in_line = [number for number in range(arrived) if number not in left]
        held_back = set(in_line[: len(taken)]) - taken
        assert named & set(waiting) == held_back & set(waiting)
