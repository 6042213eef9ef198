"""Fair sharing and classes: who gets how much, and who earns no credit."""

from __future__ import annotations

import pytest

from headway.core import policies
from headway.core.policies.classes import Classes
from headway.core.policies.fair import Fair
from headway.core.table import Phase
from tests.core.policies.queue import Queue


def served(queue: Queue, steps: int, group) -> dict[str, int]:
    """One row, one token a step; everybody is replaced when done. Tokens by group."""
    tokens: dict[str, int] = {}
    for step in range(steps):
        queue.table.step = step + 1
        handle = queue.order()[0]
        request = queue.table.request(queue.table.row_of(handle))
        queue.serve(handle, 1)
        tokens[group(request)] = tokens.get(group(request), 0) + 1
        if (
            queue.table.computed[queue.table.row_of(handle)]
            == len(request.prompt_token_ids) + request.params.max_tokens
        ):
            queue.end(handle)
            queue.add(
                len(request.prompt_token_ids),
                request.params.max_tokens,
                tenant=request.tenant,
                request_class=request.request_class,
            )
    return tokens


def test_one_sort_interleaves_the_tenants():
    queue = Queue(policies.make("fair"))
    a = [queue.add(tenant="a") for _ in range(3)]
    b = [queue.add(tenant="b") for _ in range(2)]
    assert queue.order() == [a[0], b[0], a[1], b[1], a[2]]


def test_weights_interleave_in_proportion():
    queue = Queue(Fair({"a": 2.0}))
    a = [queue.add(tenant="a") for _ in range(4)]
    b = [queue.add(tenant="b") for _ in range(2)]
    assert queue.order() == [a[0], b[0], a[1], a[2], b[1], a[3]]


def test_a_long_backlog_is_shared_by_weight():
    queue = Queue(Fair({"gold": 3.0, "silver": 2.0}))
    for tenant, length in (("gold", 7), ("silver", 30), ("bronze", 12)):
        for _ in range(4):
            queue.add(prompt_len=length, max_tokens=5, tenant=tenant)
    tokens = served(queue, 12_000, lambda request: request.tenant)
    assert tokens["gold"] == pytest.approx(6_000, rel=0.03)
    assert tokens["silver"] == pytest.approx(4_000, rel=0.03)
    assert tokens["bronze"] == pytest.approx(2_000, rel=0.03)


def test_idling_earns_no_more_than_the_credit():
    queue = Queue(Fair(credit=100.0))
    queue.serve(queue.add(prompt_len=1000, tenant="busy"), 400)
    back = queue.add(prompt_len=500, tenant="back")
    queue.serve(back, 99)
    assert queue.order() == [1, 0]
    queue.serve(back, 2)
    assert queue.order() == [0, 1]


def test_who_always_has_a_little_to_do_hoards_no_more_than_the_credit_either():
    queue = Queue(Fair(credit=100.0))
    busy = queue.add(prompt_len=20_000, tenant="busy")
    little = queue.add(prompt_len=2_000, tenant="little")
    queue.serve(busy, 5_000)
    queue.serve(little, 10)
    queue.add(tenant="little")
    assert queue.policy.counters()[queue.table.code("little")] == 4_900


def test_without_credit_idling_earns_nothing():
    queue = Queue(Fair(credit=0.0))
    busy = queue.add(prompt_len=500, tenant="busy")
    queue.serve(busy, 400)
    back = queue.add(prompt_len=500, tenant="back")
    queue.serve(back, 1)
    assert queue.order() == [busy, back]  # it does not get 400 tokens before the other gets any


def test_the_last_to_leave_sets_the_floor():
    queue = Queue(Fair(credit=0.0))
    queue.serve(queue.add(tenant="a"), 15)
    queue.end(0)
    b, a = queue.add(tenant="b"), queue.add(tenant="a")
    assert queue.order() == [b, a]
    queue.serve(b, 1)
    assert queue.order() == [a, b]


def test_weights_must_be_positive():
    with pytest.raises(ValueError, match=r"positive, got 0.0 for 'a'"):
        Fair({"a": 0.0})
    with pytest.raises(ValueError, match="cadences"):
        Classes(cadences=(3, 0))


def test_batch_waits_for_its_turn_while_realtime_waits():
    queue = Queue(policies.make("classes"))
    batch, realtime, other = queue.add(request_class="batch"), queue.add(request_class="realtime"), queue.add()
    first = {}
    for step in range(1, 31):
        queue.table.step = step
        first[step] = queue.order()[0]
    assert [step for step, handle in first.items() if handle == batch] == [10, 20, 30]  # no class had anything yet
    queue.table.step = 11
    assert queue.order() == [realtime, other, batch]


def test_on_board_goes_first_but_on_realtimes_turn():
    queue = Queue(policies.make("classes"))
    board, waiting = queue.add(request_class="batch"), queue.add(request_class="realtime")
    queue.table.phase[queue.table.row_of(board)] = Phase.RUNNING
    queue.serve(board, 5)
    orders = []
    for step in (7, 8, 9):
        queue.table.step = step
        orders.append(queue.order()[0])
    assert orders == [board, board, waiting]


def test_the_turn_is_for_those_who_had_less_than_their_share():
    queue = Queue(policies.make("classes"))
    queue.table.step = 10
    batch, realtime = queue.add(request_class="batch"), queue.add(request_class="realtime")
    queue.serve(batch, 3)
    queue.serve(realtime, 11)
    assert queue.order() == [realtime, batch]  # 3 / 1 against 11 / 4
    queue.serve(realtime, 2)
    assert queue.order() == [batch, realtime]


def test_where_turns_are_no_limit_classes_share_four_to_one():
    queue = Queue(Classes(cadences=(1, 1)))
    for request_class, length in (("realtime", 7), ("batch", 30)):
        for _ in range(3):
            queue.add(prompt_len=length, max_tokens=5, request_class=request_class)
    tokens = served(queue, 8_000, lambda request: request.request_class)
    assert tokens["realtime"] / tokens["batch"] == pytest.approx(4.0, rel=0.03)
