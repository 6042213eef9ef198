"""Quotas a minute: requests and tokens of each tenant, refused at the door where they are used up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from headway.core.request import RequestError
from headway.server.errors import OverQuota
from headway.server.keys import Rates

if TYPE_CHECKING:
    from headway.engine.api import Stream

MINUTE = 60.0


class Bucket:
    """A token bucket: holds `per_minute` at most, is full at first and fills evenly.

    What is taken may leave a debt, which must have been filled up before there is room again: so over any time no more
    than `per_minute` a minute is used, beside what one bucket holds and those it let in went on to use.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What is in it now; below 0 is a debt."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE)
        self._at = now
        return self._level

    def wait(self, amount: float) -> float:
        """Seconds until there is room for so much; for more than it can ever hold, until it is full."""
        return max(0.0, min(amount, self.per_minute) - self.level) * MINUTE / self.per_minute

    def take(self, amount: float) -> None:
        """Takes so much out, or gives it back where it is negative."""
        self._level = self.level - amount


class Quota:
    """One tenant's. Tokens are those of the answers' `usage`: prompts are taken when they come, and what is generated
    as it is generated, which is looked up when the next request asks."""

    def __init__(self, tenant: str, rates: Rates, clock: Callable[[], float]) -> None:
        self._tenant = tenant
        self.requests = Bucket(rates.requests, clock) if rates.requests else None
        self.tokens = Bucket(rates.tokens, clock) if rates.tokens else None
        self._followed: list[_Followed] = []

    def knock(self) -> None:
        """A request is at the door. Raises OverQuota: too many came in the last minute."""
        if self.requests is not None:
            if wait := self.requests.wait(1):
                raise self._used_up(f"{self.requests.per_minute} requests", wait)
            self.requests.take(1)

    def pay(self, prompt_tokens: int) -> None:
        """Its prompts are known. Raises OverQuota: too many tokens were used in the last minute."""
        if self.tokens is not None:
            self.settle()
            if wait := self.tokens.wait(prompt_tokens):
                raise self._used_up(f"{self.tokens.per_minute} tokens", wait)
            self.tokens.take(prompt_tokens)

    def give_back(self, prompt_tokens: int) -> None:
        """The engine did not take it."""
        if self.tokens is not None:
            self.tokens.take(-prompt_tokens)

    def follow(self, streams: Sequence[Stream]) -> None:
        """From now on what these, of one request, generate is taken."""
        if self.tokens is not None:
            self._followed.append(_Followed(streams))

    def settle(self) -> None:
        """Takes what has been generated since the last time, and gives prompts back that the engine has refused."""
        assert self.tokens is not None
        self.tokens.take(sum(followed.used() for followed in self._followed))
        self._followed = [followed for followed in self._followed if not followed.done]

    def _used_up(self, what: str, wait: float) -> OverQuota:
        seconds = max(1, math.ceil(wait))
        used = f"Tenant {self._tenant!r} has used its {what} per minute"
        return OverQuota(f"{used}; there is room again in {seconds} s.", seconds)

    def headers(self) -> dict[str, str]:
        """x-ratelimit-*, as OpenAI names them."""
        if self.tokens is not None:
            self.settle()
        result = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                result[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                result[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                result[f"x-ratelimit-reset-{name}"] = f"{bucket.wait(bucket.per_minute):.3f}s"
        return result


class _Followed:
    """One request's streams, and how many of the tokens that they generated have been taken."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._taken = 0
        self.done = False

    def used(self) -> int:
        """Tokens since the last time. Of a request that has been refused there were none at all."""
        streams = self._streams
        self.done = all(stream.done for stream in streams)
        if any(isinstance(stream.error, RequestError) for stream in streams):
            self.done = True
            return -self._taken - sum(len(stream.prompt_token_ids) for stream in streams)
        before, self._taken = self._taken, sum(len(c.token_ids) for stream in streams for c in stream.choices)
        return self._taken - before


def quotas(rates: Mapping[str, Rates], clock: Callable[[], float] = time.monotonic) -> dict[str, Quota]:
    """One for each tenant that has any."""
    return {tenant: Quota(tenant, limits, clock) for tenant, limits in rates.items() if limits != Rates()}
