"""Every bound in one place, with the relations between them asserted.

Nothing grows without one of these. Crossing one is a typed answer to the client (`api.refusals`) or
a typed error at start-up, never a crash. Sizes in bytes, times in seconds unless the name says other.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- what a client may send -----------------------------------------------------------------
REQUEST_LINE_BYTES_MAX: Final = 8 * KIB
HEADER_BYTES_MAX: Final = 32 * KIB
HEADER_COUNT_MAX: Final = 100
BODY_BYTES_MAX: Final = 4 * MIB
KEY_BYTES_MAX: Final = 4 * KIB
MESSAGES_MAX: Final = 2048
STOP_STRINGS_MAX: Final = 16
STOP_STRING_BYTES_MAX: Final = 512
USER_BYTES_MAX: Final = 256
MODEL_NAME_BYTES_MAX: Final = 256
PRIORITY_MAX: Final = 100
"""Of one request, before its tenant's policy lowers it."""
CONVERSATION_NAME_MAX: Final = 128
"""Characters of `conversation_id` and `session_id`."""
MAX_TOKENS_MAX: Final = 1_000_000_000
"""Larger values of `max_tokens` are refused as nonsense; smaller ones are clamped to the context."""

# --- how long a client may take --------------------------------------------------------------
HEADER_SECONDS_MAX: Final = 10.0
"""From the first byte of a request to the end of its headers; also from connecting to the first byte."""
BODY_SECONDS_MAX: Final = 30.0
"""From the end of the headers to the end of the body, plus one second per `BODY_RATE_MIN` bytes."""
BODY_RATE_MIN: Final = 64 * KIB
KEEP_ALIVE_SECONDS: Final = 75.0
WRITE_STALL_SECONDS_MAX: Final = 60.0
WRITE_STALL_BYTES_MIN: Final = 16 * KIB
"""A client that takes less than this in `WRITE_STALL_SECONDS_MAX` while bytes wait for it is disconnected."""

# --- what is told of a queue --------------------------------------------------------------------
QUEUE_POSITIONS_AT_ENTRY: Final = 32
"""A request that begins to wait is told its position among so many; behind them, that it is behind them."""
QUEUE_POSITIONS_MAX: Final = 256
"""So many have exact positions where somebody asks for the queue. Each takes a few microseconds to find."""
QUEUE_LIST_MAX: Final = 100
"""A tenant's own waiting requests in one reply."""
QUEUE_TENANTS_MAX: Final = 200
"""Tenants of one model's queue in one reply to an administrator."""

# --- connections and buffers ------------------------------------------------------------------
CONNECTIONS_MAX: Final = 4096
WRITE_BUFFER_HIGH: Final = 64 * KIB
WRITE_BUFFER_LOW: Final = 16 * KIB
PIPELINED_BYTES_MAX: Final = 64 * KIB
"""Bytes read ahead while a request is being answered. A client that sends more is still read, so that its
leaving is noticed, but what it sends is thrown away and its connection closed after the running reply."""
BODIES_BYTES_MAX: Final = 256 * MIB
"""Bytes of request bodies not yet complete, over all connections together. Whoever crosses it gets a 503."""
PARSE_BYTES_PER_STEP: Final = 4 * KIB
"""Most bytes of a socket read parsed before looking whether a request is ready: bounds what pipelining
turns into objects."""
LINGER_BYTES_MAX: Final = 16 * MIB
LINGER_SECONDS_MAX: Final = 5.0
"""After a refusal, what a client still sends is thrown away up to these, so that it sees the answer. The
bytes also bound what is thrown away behind a running request."""
CONNECTIONS_SURPLUS_MAX: Final = 64
"""Connections above `CONNECTIONS_MAX`, where no idle one can be closed to make room, that are told so (503);
further ones are cut at once."""
CANCEL_SECONDS_MAX: Final = 5.0
"""How long a cancelled request handler may clean up during shutdown before its connection is cut."""

# --- talking to model servers ------------------------------------------------------------------
UPSTREAM_BUFFER_HIGH: Final = 64 * KIB
"""Bytes of a reply kept for a consumer that is behind; then the model server is no longer read."""
RELAY_BYTES_PER_TURN: Final = 32 * KIB
"""A stream that brought at least this much in one read waits for one turn of the loop: the others run."""
UPSTREAM_HEADER_BYTES_MAX: Final = 64 * KIB
UPSTREAM_REPLY_BYTES_MAX: Final = 16 * MIB
SSE_EVENT_BYTES_MAX: Final = 1 * MIB

# --- the queue ----------------------------------------------------------------------------------
QUEUE_LENGTH_DEFAULT: Final = 256
QUEUE_TOKENS_DEFAULT: Final = 4_000_000
QUEUE_SECONDS_DEFAULT: Final = 120.0

# --- the ledger -------------------------------------------------------------------------------------
LEDGER_SECONDS_MAX: Final = 5.0
"""A reservation that cannot be written within this time refuses its request."""

SETTLE_SECONDS_MAX: Final = 10.0
"""A reply that ends in an error waits so long for its final record to be written."""

# --- worker protocol ----------------------------------------------------------------------------
COUNT_SECONDS_MAX: Final = 10.0
"""A worker that has not counted a prompt within this time is taken not to know; its upper bound stands."""

FRAME_BYTES_MAX: Final = 16 * MIB
RECORDS_UNACKNOWLEDGED_MAX: Final = 65_536
PARKING_UNWRITTEN_BYTES_MAX: Final = 256 * MIB
"""KV memory on its way into files. A worker that would put aside more waits for what is being written."""
PROGRESS_FILE_BYTES_MAX: Final = 8 * MIB
"""The worker rewrites its progress file, keeping only what is still needed, when it grows past this."""

# --- what is kept of a tenant ---------------------------------------------------------------------
DEPARTMENT_BYTES_MAX: Final = 128
DEPARTMENTS_MAX: Final = 1000
LIMITED_USERS_MAX: Final = 10_000
LIMITED_MODELS_MAX: Final = 256
"""Departments of a tenant, users and models that have limits of their own there."""
SHARED_PREFIX_CHARACTERS_MAX: Final = 64
LIMITS_BYTES_MAX: Final = 256
"""The limits of one thing, as they go from the core to the admin process."""
TENANT_PAGE_ENTRIES_MAX: Final = 20_000
"""Departments, users and models in one page of tenants; a tenant that has more is a page by itself."""

# --- the engine loop --------------------------------------------------------------------------------
CHUNK_GRAIN: Final = 64
"""Tokens. Prompts are read in by multiples of this, or of less if the engine says so (`EngineInfo.portion_grain`), and no
smaller piece is computed by itself if it can be avoided: a call has a cost of its own, and llama.cpp's flash attention
works in tiles of 64. Behind 6 000 tokens 32 more took 0.99 s and 64 more 0.62 s."""
BLOCK_TOKENS: Final = 32
"""Beginnings of prompts are told apart, and taken over, by no less than this."""

BATCH_COST_ALPHA_MIN: Final = 0.3
BATCH_COST_ALPHA_MAX: Final = 1.0
"""How much of a longest answer counts when a static batch is collected."""

TENANT_LABELS_MAX: Final = 100
"""Tenants with a label of their own in a metric; the rest is counted as `other`."""

# --- the simulator -----------------------------------------------------------------------------
TRACE_BYTES_MAX: Final = 2048 * MIB
"""Of a trace or decision log, unpacked."""
TRACE_REQUESTS_MAX: Final = 10_000_000
"""Of a trace, or a synthetic load."""
TRACE_TOKENS_MAX: Final = 10_000_000
"""Of a prompt or an answer in a trace."""
TRACE_SECONDS_MAX: Final = 100_000_000
"""From the first request of a trace to the last: three years."""
TRACE_TIME_US_MAX: Final = 4 * 10**15
"""Times in traces are at most so far from 0: traces that count from 1970 end in 2096."""
SIMULATED_WORKERS_MAX: Final = 1000
SIMULATED_SLOTS_MAX: Final = 4096
SEED_MAX: Final = 2**63 - 1

# --- sessions -----------------------------------------------------------------------------------
SESSIONS_MAX: Final = 100_000
"""Sessions known at once, of all tenants; the one that was idle longest makes room."""

# --- where requests went ---------------------------------------------------------------------------
PROMPT_CHARACTERS_MAX: Final = 256 * KIB
PROMPT_KEYS_MAX: Final = 256
"""A prompt is recognised by no more than so much of its beginning, in so many pieces and those of one message."""
AFFINITY_PLACES_MAX: Final = 65_536
"""What is remembered of one model: so many times that a piece of a prompt, or a conversation, is at a worker."""
AFFINITY_PLACE_BYTES_MAX: Final = 512
"""Memory that each of them takes at most: all of one model's together stay below 34 MB."""
KEPT_SESSIONS_MAX: Final = 4_096
"""Conversations that a worker names when it starts."""

# --- caches ------------------------------------------------------------------------------------
VERIFIED_KEYS_MAX: Final = 10_000
CALLERS_RESOLVED_MAX: Final = 10_000
"""Combinations of key, user and model whose limits are remembered."""

assert WRITE_BUFFER_LOW < WRITE_BUFFER_HIGH
assert KEY_BYTES_MAX < HEADER_BYTES_MAX
assert BODY_BYTES_MAX <= BODIES_BYTES_MAX, "one body alone has to be possible"
assert REQUEST_LINE_BYTES_MAX <= HEADER_BYTES_MAX
assert PARSE_BYTES_PER_STEP <= HEADER_BYTES_MAX
assert LINGER_BYTES_MAX > BODY_BYTES_MAX, "a body refused for its size has to fit into the linger"
assert RELAY_BYTES_PER_TURN <= UPSTREAM_BUFFER_HIGH
assert BODY_BYTES_MAX < FRAME_BYTES_MAX, "a whole request has to fit into one worker message"
assert DEPARTMENTS_MAX + LIMITED_USERS_MAX + LIMITED_MODELS_MAX <= TENANT_PAGE_ENTRIES_MAX
assert (
    TENANT_PAGE_ENTRIES_MAX * (max(USER_BYTES_MAX, MODEL_NAME_BYTES_MAX) + LIMITS_BYTES_MAX) < FRAME_BYTES_MAX
)
assert HEADER_SECONDS_MAX < BODY_SECONDS_MAX < KEEP_ALIVE_SECONDS
