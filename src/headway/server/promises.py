"""Which promises were kept: by class, tenant and length of the prompt. What was refused is a miss."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from headway.core.batch import Finished
from headway.core.request import NO_SLO, FinishReason, Slo
from headway.engine.api import Stream

REQUEST_CLASSES = ("", "realtime", "batch")
MOST_TENANTS = 64
"""The tenants that come after so many are counted together."""
NO_TENANT, OTHERS = "none", "others"
QUARTILES = ("1", "2", "3", "4")
BINS_PER_OCTAVE = 4


class Quartiles:
    """In which quarter of all prompts a length is, the shortest being "1".

    The bounds are learnt from what has come, to a fifth of a length; the first few requests' say little.
    """

    def __init__(self) -> None:
        self._counts = [0] * 96
        self._total = 0

    def of(self, length: int) -> str:
        """Takes a prompt of `length` tokens into account, and says where it is: by the middle of its own bin."""
        place = min(len(self._counts) - 1, bisect_left(_BOUNDS, length))
        below, own = sum(self._counts[:place]), self._counts[place]
        self._counts[place] += 1
        self._total += 1
        return QUARTILES[min(3, int(4 * (below + (own + 1) / 2) / self._total))]


_BOUNDS = [2.0 ** (i / BINS_PER_OCTAVE) for i in range(96)]


class Promises:
    """Counts of (name, kept) for each way to look at them, of the requests that were promised something."""

    def __init__(self) -> None:
        self.by_class: Counter[tuple[str, bool]] = Counter()
        self.by_tenant: Counter[tuple[str, bool]] = Counter()
        self.by_length: Counter[tuple[str, bool]] = Counter()
        self.tenants = [NO_TENANT, OTHERS]
        self._quartiles = Quartiles()
        self._made: dict[Stream, tuple[Slo, str, str, str]] = {}
        self._open: Counter[Stream] = Counter()
        """Choices whose ends are to come. A stream's id is no key: it may be another's before the engine is done."""

    def make(self, stream: Stream, request_class: str, tenant: str, slo: Slo) -> None:
        """A request was promised something; whether that was kept is found out when it ends."""
        if slo != NO_SLO:
            quartile = self._quartiles.of(len(stream.prompt_token_ids))
            self._made[stream] = slo, request_class, self._known(tenant), quartile
            self._open[stream] = stream.params.n

    def miss(self, prompt_len: int, request_class: str, tenant: str, slo: Slo) -> None:
        """One was refused before it came to the engine."""
        if slo != NO_SLO:
            self._count(False, request_class, self._known(tenant), self._quartiles.of(prompt_len))

    def refused(self, stream: Stream) -> None:
        """An on_refused hook: the engine will not serve one."""
        made = self._made.pop(stream, None)
        if made is not None:
            del self._open[stream]
            self._count(False, *made[1:])

    def settle(self, end: Finished, stream: Stream) -> None:
        """A choice has ended."""
        made = self._made.get(stream)
        if made is None:
            return
        self._open[stream] -= 1
        if not self._open[stream]:
            del self._made[stream], self._open[stream]
        self._count(_kept(end, made[0]), *made[1:])

    def _count(self, kept: bool, request_class: str, tenant: str, quartile: str) -> None:
        self.by_class[request_class if request_class in REQUEST_CLASSES else "", kept] += 1
        self.by_tenant[tenant, kept] += 1
        self.by_length[quartile, kept] += 1

    def _known(self, tenant: str) -> str:
        """Metrics do not grow with what clients write into a field."""
        name = tenant or NO_TENANT
        if name not in self.tenants and len(self.tenants) < MOST_TENANTS:
            self.tenants.append(name)
        return name if name in self.tenants else OTHERS


def mean_token_time(end: Finished) -> float:
    """TPOT: the mean time of an output token after the first."""
    return (end.finished - end.first_token) / (end.output_len - 1) if end.output_len > 1 else 0.0


def _kept(end: Finished, slo: Slo) -> bool:
    return (
        end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        and end.first_token - end.arrival <= slo.ttft
        and mean_token_time(end) <= slo.tpot
        and end.finished - end.arrival <= slo.deadline
    )
