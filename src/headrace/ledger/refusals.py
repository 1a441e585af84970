"""Refusals above a rate are summed up: a client that storms against a limit must not fill the disk.

Of each tenant, key, model and code so many refusals a second are recorded one by one; the rest of that
second becomes one record with `num_requests`. Nothing is ever lost: what goes in comes out, in number.
"""

from typing import Final

import msgspec

from headrace.ledger.records import OperationRecord

SUMS_MAX: Final = 1024
"""Distinct sums kept at once; beyond it a tenant's refusals are summed whatever their key, model and code."""

Source = tuple[str, str, str, str | None]
"""Tenant, key, model and code of a refusal."""


class RefusalSummary:
    """Decides for each refusal. Times in microseconds of any one clock; going back is taken for standing still."""

    def __init__(self, *, singles_per_s: int, sums_max: int = SUMS_MAX) -> None:
        assert singles_per_s >= 0
        assert sums_max >= 1
        self._singles_per_s = singles_per_s
        self._sums_max = sums_max
        self._second = 0
        self._num_singles: dict[Source, int] = {}
        self._sums: dict[tuple[int, Source], OperationRecord] = {}
        self._tenant_sums: dict[str, tuple[int, OperationRecord]] = {}
        """The first second of each, and the sum. One a tenant, so bounded by the tenants there are."""

    @property
    def num_sums(self) -> int:
        """Sums that wait to be returned."""
        return len(self._sums) + len(self._tenant_sums)

    def take(self, record: OperationRecord, now_us: int) -> bool:
        """True: record it by itself, now. False: it is part of a sum that `due` or `drain` will return."""
        self._advance(now_us)
        source = _source(record)
        num_singles = self._num_singles.get(source)
        if num_singles is None:
            num_singles = 0 if len(self._num_singles) < self._sums_max else self._singles_per_s
        if num_singles < self._singles_per_s:
            self._num_singles[source] = num_singles + 1
            return True
        self._add(source, record)
        return False

    def due(self, now_us: int) -> list[OperationRecord]:
        """The sums of the seconds that are over, each returned once."""
        self._advance(now_us)
        over = [key for key in self._sums if key[0] < self._second]
        over_tenants = [tenant for tenant, (second, _) in self._tenant_sums.items() if second < self._second]
        return [self._sums.pop(key) for key in over] + [
            self._tenant_sums.pop(tenant)[1] for tenant in over_tenants
        ]

    def drain(self) -> list[OperationRecord]:
        """All sums, at stop."""
        sums = [*self._sums.values(), *(record for _, record in self._tenant_sums.values())]
        self._sums.clear()
        self._tenant_sums.clear()
        return sums

    def _advance(self, now_us: int) -> None:
        second = now_us // 1_000_000
        if second > self._second:
            self._second = second
            self._num_singles.clear()

    def _add(self, source: Source, record: OperationRecord) -> None:
        key = (self._second, source)
        known = self._sums.get(key)
        if known is not None:
            self._sums[key] = _sum(known, record)
        elif len(self._sums) < self._sums_max:
            self._sums[key] = record
        else:
            tenant = record.tenant_id
            second, whole = self._tenant_sums.get(tenant, (self._second, None))
            self._tenant_sums[tenant] = (second, record if whole is None else _sum(whole, record))


def _source(record: OperationRecord) -> Source:
    return (record.tenant_id, record.api_key_id, record.model, record.code)


def _sum(first: OperationRecord, other: OperationRecord) -> OperationRecord:
    """Both as one record, under the id of the first. What they do not share is left empty."""

    def shared(name: str) -> str | None:
        value = getattr(first, name)
        assert value is None or isinstance(value, str)
        return value if value == getattr(other, name) else None

    return msgspec.structs.replace(
        first,
        num_requests=first.num_requests + other.num_requests,
        user_id=shared("user_id"),
        department=shared("department"),
        api_key_id=shared("api_key_id") or "",
        model=shared("model") or "",
        code=shared("code"),
        trace_id=shared("trace_id") or "",
        queue_enter_ts=min(first.queue_enter_ts, other.queue_enter_ts),
        end_ts=max(first.end_ts, other.end_ts),
        latency_us=max(first.latency_us, other.latency_us),
    )
