"""Who asks for what and when: synthetic loads. All lists are in order of arrival."""

import random
from collections.abc import Callable, Iterable

import msgspec

from headrace.scheduling.policy import ServiceClass

SECOND_US = 1_000_000


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request. It has sizes and no content."""

    arrival_us: int
    tenant: str
    prompt_tokens: int
    output_tokens: int
    weight: float = 1.0
    service_class: ServiceClass = "interactive"
    priority: int = 0
    blocks: tuple[int, ...] = ()
    """Identities of the prompt's leading blocks; equal ones in front are an equal prefix."""
    cached_tokens: int = 0
    """Prompt tokens that came out of a cache when this was recorded. They do so again, unless the simulated
    cache decides by `blocks`."""
    expected_output_tokens: int | None = None
    """What was expected of the answer when this was recorded. None: as the run's prediction says."""


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that sends one kind of request at a rate."""

    tenant: str
    rate_rps: float
    prompt_tokens: int = 256
    output_tokens: int = 256
    output_spread: float = 0.0
    """Answers are up to so much of it shorter or longer, all lengths alike."""
    weight: float = 1.0
    service_class: ServiceClass = "interactive"
    is_poisson: bool = False
    on_s: float | None = None
    """Sends for so long, then is silent for as long, and so on. None: always sends."""
    start_s: float = 0.0
    end_s: float | None = None

    def arrivals(self, duration_s: float, draw: random.Random) -> Iterable[Arrival]:
        number, at_s = 0, self.start_s
        if self.is_poisson:
            at_s += draw.expovariate(self.rate_rps)
        end_s = duration_s if self.end_s is None else min(duration_s, self.end_s)
        while at_s < end_s:
            if self.on_s is None or int((at_s - self.start_s) / self.on_s) % 2 == 0:
                yield self._request(at_s, draw)
            number += 1
            at_s = (
                at_s + draw.expovariate(self.rate_rps)
                if self.is_poisson
                else self.start_s + number / self.rate_rps
            )

    def _request(self, at_s: float, draw: random.Random) -> Arrival:
        output_tokens = self.output_tokens
        if self.output_spread:
            output_tokens = round(
                output_tokens * draw.uniform(1 - self.output_spread, 1 + self.output_spread)
            )
        return Arrival(
            arrival_us=round(at_s * SECOND_US),
            tenant=self.tenant,
            prompt_tokens=self.prompt_tokens,
            output_tokens=output_tokens,
            weight=self.weight,
            service_class=self.service_class,
        )


def merged(clients: Iterable[Client], duration_s: float, *, seed: int = 0) -> list[Arrival]:
    """What all clients send in this time."""
    draw = random.Random(seed)  # noqa: S311 - nothing secret: the same load for the same seed
    found = [arrival for client in clients for arrival in client.arrivals(duration_s, draw)]
    found.sort(key=lambda arrival: arrival.arrival_us)
    return found


def overload() -> list[Client]:
    """Two tenants, both over their half; one asks for twice as much."""
    return [Client(tenant="c1", rate_rps=1.5), Client(tenant="c2", rate_rps=3.0)]


def proportional() -> list[Client]:
    """Two below their third, one far above."""
    return [Client(tenant=f"c{number}", rate_rps=rate) for number, rate in enumerate((0.25, 0.5, 1.5), 1)]


def on_off_less() -> list[Client]:
    """One comes and goes, below its share; one always floods."""
    return [Client(tenant="c1", rate_rps=0.5, on_s=60), Client(tenant="c2", rate_rps=2.0)]


def on_off_overload() -> list[Client]:
    """One comes and goes, above its share while it is there."""
    return [Client(tenant="c1", rate_rps=2.0, on_s=60), Client(tenant="c2", rate_rps=3.0)]


def short_long() -> list[Client]:
    """Many short requests against few long ones."""
    return [
        Client(tenant="short", rate_rps=8.0, prompt_tokens=64, output_tokens=64, is_poisson=True),
        Client(tenant="long", rate_rps=1.5, is_poisson=True),
    ]


def weighted() -> list[Client]:
    """Four that always have more waiting, with weights 1 to 4."""
    return [Client(tenant=f"w{number}", rate_rps=2.0, weight=float(number)) for number in range(1, 5)]


def long_prompts() -> list[Client]:
    """Short chats, and from time to time a prompt of 6 000 tokens."""
    return [
        Client(tenant="short", rate_rps=5.0, prompt_tokens=64, output_tokens=16, is_poisson=True),
        Client(tenant="long", rate_rps=0.1, prompt_tokens=6000, output_tokens=64, start_s=5.0),
    ]


def classes() -> list[Client]:
    """Interactive at 120 % of what one engine of the tables can do, and batch behind it."""
    return [
        Client(tenant="high", rate_rps=2.1, is_poisson=True),
        Client(tenant="low", rate_rps=0.3, service_class="batch", is_poisson=True),
    ]


def returning() -> list[Client]:
    """One floods from the start; one comes after five minutes and floods too."""
    return [Client(tenant="here", rate_rps=3.0), Client(tenant="back", rate_rps=3.0, start_s=300.0)]


def flood_and_chat() -> list[Client]:
    """200 long jobs in the first ten seconds, and one short chat every two seconds."""
    return [
        Client(tenant="flood", rate_rps=20.0, output_tokens=1000, end_s=10.0),
        Client(tenant="chat", rate_rps=0.5, prompt_tokens=64, output_tokens=32, start_s=1.0),
    ]


def flood_and_visitors() -> list[Client]:
    """The same with answers of many lengths, and the chats from ten tenants that come now and then."""
    flood = Client(tenant="flood", rate_rps=20.0, output_tokens=1000, output_spread=0.8, end_s=10.0)
    return [flood, *visitors()]


def visitors() -> list[Client]:
    """Ten tenants that send one short chat every twenty seconds."""
    return [
        Client(
            tenant=f"visitor{number}",
            rate_rps=0.05,
            prompt_tokens=64,
            output_tokens=32,
            start_s=1.0 + 2 * number,
        )
        for number in range(10)
    ]


LOADS: dict[str, Callable[[], list[Client]]] = {
    "overload": overload,
    "proportional": proportional,
    "on-off-less": on_off_less,
    "on-off-overload": on_off_overload,
    "short-long": short_long,
    "weighted": weighted,
    "long-prompts": long_prompts,
    "classes": classes,
    "returning": returning,
    "flood-and-chat": flood_and_chat,
    "flood-and-visitors": flood_and_visitors,
}
"""Synthetic loads by name."""
