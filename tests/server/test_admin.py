"""Run-time control: strategies change under load, nothing is lost, and nobody else may do it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import pytest

from headway.core.policies import POLICIES
from headway.core.strategies import FORMATIONS

SCHEDULER = "/admin/scheduler"


def complete(client: httpx.Client, number: int) -> tuple[str, int]:
    body = {"prompt": f"Number {number} of many, ", "max_tokens": 40, "ignore_eos": True, "n": 1 + number % 2}
    answer = client.post("/v1/completions", json=body, timeout=60).json()
    return answer["choices"][-1]["text"], answer["usage"]["completion_tokens"]


@pytest.fixture
def restored(client: httpx.Client):
    before = client.get(SCHEDULER).json()
    yield
    changes = {name: value for name, value in before.items() if name not in ("max_num_seqs", "prefix_caching")}
    assert client.post(SCHEDULER, json=changes).json() == before


def test_every_pair_after_another_with_requests_in_flight(client: httpx.Client, restored: None) -> None:
    alone = [complete(client, number) for number in range(24)]
    with ThreadPoolExecutor(8) as users:
        answers = users.map(lambda number: complete(client, number), range(24))
        for batching, policy in product(FORMATIONS, POLICIES):
            changes = {"batching": batching, "policy": policy, "static_timeout": 0.02}
            shown = client.post(SCHEDULER, json=changes).json()
            assert shown | changes == shown == client.get(SCHEDULER).json()
        assert list(answers) == alone
    assert client.get("/load").json()["kv_cache_usage"] == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"polizy": "fcfs"}, "polizy"),
        ({"policy": "nonsense"}, "nonsense"),
        ({"policy": "os.path:join"}, "os.path:join"),
        ({"policy": "/tmp/mine.py:Mine"}, "mine.py"),
        ({"batching": "nonsense"}, "nonsense"),
        ({"batching": 5}, "batching"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": 10**6}, "max_batch_size"),
        ({"max_overtaking": 10**30}, "max_overtaking"),
        ({"max_num_partial_prefills": 10**30}, "max_num_partial_prefills"),
        ({"tenants": {"a": {"max_in_flight": 10**30}}}, "max_in_flight"),
        ({"max_num_seqs": 1000}, "seqs"),
        ({"prefix_caching": False}, "prefix_caching"),
        ({"max_num_batched_tokens": 10**6}, "max_num_batched_tokens"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    client: httpx.Client, changes: dict[str, Any], named: str
) -> None:
    before = client.get(SCHEDULER).json()
    response = client.post(SCHEDULER, json=changes | {"burst_size": 7})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
    assert client.get(SCHEDULER).json() == before


def test_a_page_in_a_browser_or_a_proxy_cannot(client: httpx.Client) -> None:
    plain = {"content-type": "text/plain"}
    assert client.post(SCHEDULER, content=b'{"policy": "fcfs"}', headers=plain).status_code == 415
    forwarded = {"x-forwarded-for": "203.0.113.7"}
    for response in (
        client.get(SCHEDULER, headers=forwarded),
        client.post(SCHEDULER, json={"policy": "fcfs"}, headers=forwarded),
    ):
        assert response.status_code == 403
        assert response.json()["error"]["type"] == "permission_error"


def test_of_two_changes_at_a_time_none_is_lost(client: httpx.Client, restored: None) -> None:
    """Each sets a field of its own; whoever comes second must see what the first has set."""
    url = str(client.base_url).rstrip("/") + SCHEDULER
    fields = {"burst_size": 5, "max_num_partial_prefills": 3, "tpot_slo": 0.07, "cluster_wait": 9.0, "max_wait": 0.03}
    for round_ in range(5):
        wanted = {name: value + round_ for name, value in fields.items()}
        with ThreadPoolExecutor(len(wanted)) as users:
            answers = users.map(lambda one: httpx.post(url, json=dict([one])), wanted.items())
            assert [answer.status_code for answer in answers] == [200] * len(wanted)
        assert client.get(SCHEDULER).json().items() >= wanted.items()
