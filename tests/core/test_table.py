"""The table of requests: what one of them asks for costs the others nothing."""

from __future__ import annotations

import numpy as np

from headway.core.request import Request, SamplingParams
from headway.core.table import FEW, RequestTable


def request(handle: int, stops: list[int]) -> Request:
    return Request(f"r{handle}", handle, [1, 2, 3], SamplingParams(), 0.0, stops)


def test_each_row_stops_at_its_own_tokens_however_many() -> None:
    table = RequestTable(capacity=4)
    wanted = [[], [7], list(range(10, 10 + FEW)), list(range(100, 1100)), [7, 100]]
    rows = np.array([table.add(request(i, stops), 20, 1) for i, stops in enumerate(wanted)])
    for token in (0, 7, 10, 10 + FEW - 1, 10 + FEW, 99, 100, 1099, 1100):
        found = table.stops(rows, np.full(len(rows), token, np.int32))
        assert found.tolist() == [token in stops for stops in wanted], token
    assert len(table.stop_ids) <= FEW, "a step looks through all columns, whoever is in it"


def test_a_row_that_is_used_again_forgets_the_stops_of_before() -> None:
    table = RequestTable(capacity=1)
    for round_ in range(3):
        row = table.add(request(round_, list(range(50)) if round_ % 2 == 0 else [60]), 20, 1)
        rows = np.array([row] * 2)
        assert table.stops(rows, np.array([7, 60], np.int32)).tolist() == [round_ % 2 == 0, round_ % 2 == 1]
        table.free(row)
    row = table.add(request(9, []), 20, 1)
    assert not table.stops(np.array([row]), np.array([7], np.int32)).any()
