"""Promises over HTTP: what cannot be kept is refused with the wait that is predicted, and counted as missed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from headway.cli.main import main
from headway.cli.values import class_slo
from headway.core.batch import Finished
from headway.core.request import FinishReason, SamplingParams, Slo
from headway.server.promises import MOST_TENANTS, OTHERS, QUARTILES, Promises, Quartiles
from tests.server.conftest import Server, running
from tests.server.test_metrics import scrape

IDS = [5, 6, 7]
UNKEEPABLE = {"ttft_slo_ms": 0.001}


@pytest.fixture(scope="module")
def strict(tiny_model_dir) -> Iterator[Server]:
    """Refuses; batch requests are promised what no device can keep."""
    settings = "class_slo={'batch': __import__('headway.core.request').core.request.Slo(ttft=1e-6)}"
    with running(tiny_model_dir, settings=settings) as server:
        httpx.post(f"{server.url}/admin/scheduler", json={"admission": "refuse"}).raise_for_status()
        ask(server, max_tokens=40)  # so that the device is known
        yield server


def ask(server: Server, **fields: object) -> httpx.Response:
    body = {"prompt": IDS, "max_tokens": 4, "ignore_eos": True} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_kept_is_refused_with_the_predicted_wait(strict, stream):
    answer = ask(strict, stream=stream, **UNKEEPABLE)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["code"] == "slo_unattainable"
    assert error["type"] == "rate_limit_error"
    assert "predicted after" in error["message"]


def test_one_refused_choice_refuses_the_request_and_leaves_nothing(strict):
    assert ask(strict, n=3, **UNKEEPABLE).status_code == 429
    strict.wait_until_idle()


def test_who_promises_nothing_or_enough_is_served(strict):
    assert ask(strict).status_code == 200
    assert ask(strict, ttft_slo_ms=60_000, tpot_slo_ms=10_000, deadline_ms=100_000).status_code == 200


def test_a_class_is_promised_its_default_where_a_request_does_not_say(strict):
    assert ask(strict, request_class="batch").status_code == 429
    assert ask(strict, request_class="batch", ttft_slo_ms=60_000).status_code == 200
    assert ask(strict, request_class="realtime").status_code == 200


def test_a_refusal_is_a_miss_by_class_tenant_and_length(strict):
    before = scrape(strict)
    ask(strict, request_class="realtime", user="ann", **UNKEEPABLE)
    ask(strict, request_class="realtime", user="ann", ttft_slo_ms=60_000)
    after = scrape(strict)
    changed = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}

    def grown(name: str, **labels: str) -> float:
        return sum(by for key, by in changed.items() if key == "/".join([name, *labels.values()]))

    for outcome in ("attained", "missed"):
        assert grown(f"headway:requests_slo_{outcome}_total", request_class="realtime") == 1
        assert grown(f"headway:requests_slo_{outcome}_by_tenant_total", tenant="ann") == 1
        assert sum(grown(f"headway:requests_slo_{outcome}_by_length_total", quartile=one) for one in QUARTILES) == 1
    assert grown("headway:requests_rejected_total", reason="slo_unattainable") == 1


def test_quartiles_of_prompts_are_learnt():
    quartiles = Quartiles()
    lengths = [10, 100, 1_000, 10_000]
    for _ in range(50):
        for length in lengths:
            quartiles.of(length)
    assert [quartiles.of(length) for length in lengths] == ["1", "2", "3", "4"]
    assert quartiles.of(1) == "1"
    assert quartiles.of(10**9) == "4"


class FakeStream:
    def __init__(self, name: str, n: int = 1) -> None:
        self.request_id, self.prompt_token_ids, self.done = name, IDS, True
        self.params = SamplingParams(n=n)


def end(first: float, finished: float, tokens: int = 5, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    return Finished(1, "a", reason, None, 3, tokens, 0, 0, 0.0, first, finished, {})


@pytest.mark.parametrize(
    ("slo", "ended", "kept"),
    [
        (Slo(ttft=1.0), end(0.9, 50.0), True),
        (Slo(ttft=1.0), end(1.1, 1.2), False),
        (Slo(tpot=0.5), end(9.0, 11.0), True),
        (Slo(tpot=0.5), end(9.0, 11.1), False),
        (Slo(deadline=4.0), end(1.0, 4.0), True),
        (Slo(deadline=4.0), end(1.0, 4.1), False),
        (Slo(deadline=4.0), end(1.0, 2.0, reason=FinishReason.ABORT), False),
    ],
)
def test_a_promise_is_kept_if_all_of_it_is(slo, ended, kept):
    promises, stream = Promises(), FakeStream("a")
    promises.make(stream, "batch", "ann", slo)
    promises.settle(ended, stream)
    assert promises.by_class == {("batch", kept): 1}
    assert promises.by_tenant == {("ann", kept): 1}


def test_every_choice_counts_once_and_for_its_own_request():
    """The reader's part is over (`done`) before the engine has told of every choice, and the id may be used again."""
    promises, first, second = Promises(), FakeStream("same", n=3), FakeStream("same")
    promises.make(first, "batch", "ann", Slo(ttft=1.0))
    promises.settle(end(0.5, 2.0), first)
    promises.make(second, "realtime", "ann", Slo(ttft=9.0))
    promises.settle(end(3.0, 4.0), second)
    promises.settle(end(0.5, 2.0), first)
    promises.settle(end(3.0, 4.0), first)
    assert promises.by_class == {("batch", True): 2, ("realtime", True): 1, ("batch", False): 1}
    assert not promises._made
    assert not promises._open


def test_tenants_in_metrics_are_bounded():
    promises = Promises()
    for i in range(1_000):
        promises.miss(3, "", f"tenant {i}", Slo(ttft=1.0))
    assert len(promises.tenants) == MOST_TENANTS
    assert promises.by_tenant[OTHERS, False] > 500
    assert sum(promises.by_tenant.values()) == 1_000


def test_a_class_flag_is_in_milliseconds_and_a_requests_own_promise_wins():
    name, default = class_slo("realtime=ttft:2000,tpot:100")
    assert (name, default) == ("realtime", Slo(ttft=2.0, tpot=0.1))
    assert class_slo("=deadline:60000") == ("", Slo(deadline=60.0))
    assert Slo(ttft=9.0, deadline=5.0).over(default) == Slo(ttft=9.0, tpot=0.1, deadline=5.0)
    assert Slo(ttft=9.0).over(Slo()) == Slo(ttft=9.0)


def test_a_flag_that_is_no_promise_is_refused(capsys):
    for wrong in ("realtime", "realtime=soon:3", "someone=ttft:3", "realtime=ttft:0", "realtime=ttft:x"):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "--class-slo", wrong])
        assert "--class-slo" in capsys.readouterr().err
