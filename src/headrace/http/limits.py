"""The bounds one server works with: those of `headrace.bounds`, changeable per server (tests shorten them)."""

from dataclasses import dataclass

from headrace import bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Sizes in bytes, times in seconds. Times are kept to within one `sweep_seconds`."""

    request_line_bytes_max: int = bounds.REQUEST_LINE_BYTES_MAX
    header_bytes_max: int = bounds.HEADER_BYTES_MAX
    header_count_max: int = bounds.HEADER_COUNT_MAX
    body_bytes_max: int = bounds.BODY_BYTES_MAX
    header_seconds_max: float = bounds.HEADER_SECONDS_MAX
    body_seconds_max: float = bounds.BODY_SECONDS_MAX
    body_rate_min: int = bounds.BODY_RATE_MIN
    keep_alive_seconds: float = bounds.KEEP_ALIVE_SECONDS
    write_stall_seconds_max: float = bounds.WRITE_STALL_SECONDS_MAX
    write_stall_bytes_min: int = bounds.WRITE_STALL_BYTES_MIN
    connections_max: int = bounds.CONNECTIONS_MAX
    connections_surplus_max: int = bounds.CONNECTIONS_SURPLUS_MAX
    write_buffer_high: int = bounds.WRITE_BUFFER_HIGH
    write_buffer_low: int = bounds.WRITE_BUFFER_LOW
    pipelined_bytes_max: int = bounds.PIPELINED_BYTES_MAX
    bodies_bytes_max: int = bounds.BODIES_BYTES_MAX
    linger_bytes_max: int = bounds.LINGER_BYTES_MAX
    linger_seconds_max: float = bounds.LINGER_SECONDS_MAX
    cancel_seconds_max: float = bounds.CANCEL_SECONDS_MAX
    sweep_seconds: float = 1.0

    def __post_init__(self) -> None:
        assert 0 <= self.write_buffer_low < self.write_buffer_high
        assert self.sweep_seconds > 0
