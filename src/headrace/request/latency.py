"""What a client says about how soon it needs its answer."""

from typing import Literal

LatencySla = Literal["low", "normal", "throughput"]
"""`low`: as soon as possible; `throughput`: whenever there is room, as long as it is cheap."""
