"""Memory that requests on workers hold, in bytes, and who is slowed down for having asked for too much of it."""

from collections.abc import Iterable

from headrace.limits.account import Account


def has_room(account: Account, memory: int, *, is_begun: bool) -> bool:
    """Whether an account that limits memory has so much left. One that `is_begun` may have grown beyond the limit: it goes
    on where nobody else holds anything.
    """
    assert account.memory_max is not None
    return account.memory + memory <= account.memory_max or (is_begun and not account.memory)


def fits(accounts: Iterable[Account], *, memory: int, is_begun: bool = False) -> bool:
    """Whether no limit of memory keeps a request from a worker now."""
    return all(
        has_room(account, memory, is_begun=is_begun) for account in accounts if account.memory_max is not None
    )


def resize(accounts: Iterable[Account], more: int) -> None:
    """A request on a worker turns out to need so many bytes more (or fewer, below 0). No limit stands against that."""
    for account in accounts:
        account.memory += more
        assert account.memory >= 0


def smallest_limit(accounts: Iterable[Account]) -> int | None:
    """Bytes that one request can have at most, alone; None if no level limits memory."""
    limits = [account.memory_max for account in accounts if account.memory_max is not None]
    return min(limits) if limits else None


def left(accounts: Iterable[Account]) -> int | None:
    """Bytes that one more request can have now; None if no level limits memory."""
    leftovers = [
        account.memory_max - account.memory for account in accounts if account.memory_max is not None
    ]
    return min(leftovers) if leftovers else None


def is_throttled(accounts: Iterable[Account], now_us: int) -> bool:
    """Whether one of them was refused for memory not long ago."""
    for account in accounts:
        if account.memory_max is not None and account.throttled_until_us > now_us:
            return True
    return False
