"""What can be changed of a model's workers while they run."""

from typing import Annotated

import msgspec

BatchSize = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
BatchTokens = Annotated[int, msgspec.Meta(ge=64, le=8192)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=60_000)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=60_000)]


class Controls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: as it was configured. A worker never goes beyond what it was loaded for."""

    max_batch_size: BatchSize | None = None
    """Requests that run together in one worker."""
    max_batch_tokens: BatchTokens | None = None
    """Tokens computed in one step."""
    target_step_ms: Milliseconds | None = None
    """How long a step may take while streams are running; it decides how large a portion of a prompt is."""
    idle_step_ms: Milliseconds | None = None
    """The same while nothing is decoding."""
    batch_wait_ms: Wait | None = None
    """How long a request waits for others to start with it, after idle time or in a static batch."""
    max_concurrent_requests: BatchSize | None = None
    """Requests in the model's replica at once, be it a worker or a foreign server; the rest waits in the queue."""


AS_CONFIGURED = Controls()
