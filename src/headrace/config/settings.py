"""All settings of a server, as one tree of structs.

A YAML file, environment variables and command line flags end up here (`headrace.config.loading`).
The published JSON schema is generated from these structs, so a field's docstring, type and bounds
are its documentation.
"""

from typing import Annotated, Literal

import msgspec

from headrace import bounds
from headrace.config.limits import UNLIMITED, Limits
from headrace.config.scheduling import SchedulingSettings

Port = Annotated[int, msgspec.Meta(ge=0, le=65535, description="TCP port; 0 takes a free one")]
ModelId = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=bounds.MODEL_NAME_BYTES_MAX,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$",
        description="the name clients ask for",
    ),
]

EngineLibrary = Literal["wheel", "native"]

DEBUG_CELLS = "HEADRACE_DEBUG_CELLS"
"""An environment variable, not a setting: 1 lets workers compare their books of KV cells with the engine's after every step."""
BUILTIN_MODEL = "smollm2-135m-instruct"
"""The model that `make install` brings along."""
BUILTIN_PATH = "builtin"
"""Its `path`."""


class StubTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the stub engine behaves: for load tests and simulation, never for real answers."""

    prefill_us_per_token: Annotated[int, msgspec.Meta(ge=0)] = 50
    decode_us_per_step: Annotated[int, msgspec.Meta(ge=0)] = 5_000
    decode_us_per_sequence: Annotated[int, msgspec.Meta(ge=0)] = 100
    output_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Length of an answer that nothing cuts short."""
    seed: int = 0
    fault_every_steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Fail every so many forward calls; 0 never fails."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one worker computes. Names follow the scheduler's: a sequence is one request in the engine."""

    max_batch_size: Annotated[
        int, msgspec.Meta(ge=1, le=256, description="requests that run together in one worker")
    ] = 32
    max_context_tokens: Annotated[
        int, msgspec.Meta(ge=64, le=1_048_576, description="prompt and answer of one request, in tokens")
    ] = 2048
    max_batch_tokens: Annotated[
        int,
        msgspec.Meta(ge=64, le=8192, description="tokens computed in one step, decode and prefill together"),
    ] = 512
    target_step_ms: Annotated[
        float, msgspec.Meta(gt=0, le=60_000, description="how long a step may take while streams are running")
    ] = 500.0
    idle_step_ms: Annotated[
        float, msgspec.Meta(gt=0, le=60_000, description="how long a step may take while nothing is decoding")
    ] = 500.0
    batching: Literal["continuous", "static"] = "continuous"
    """`continuous`: requests join and leave between steps. `static`: they are collected into a batch that runs to its end
    before the next one begins, for engines that can do no better."""
    batch_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    """How long a request waits for others to start with it: after idle time, or until its static batch is flushed.
    Interactive use: 2 to 10."""
    offline_batch_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 50.0
    """The same for requests that ask for throughput. Offline use: 20 to 100."""
    batch_cost_alpha: Annotated[
        float, msgspec.Meta(ge=bounds.BATCH_COST_ALPHA_MIN, le=bounds.BATCH_COST_ALPHA_MAX)
    ] = 0.5
    """A static batch holds requests as long as their prompts and this share of their longest answers, in tokens, stay
    within `max_batch_tokens`."""
    library: EngineLibrary = "wheel"
    """The llama.cpp library that computes: `wheel` came with the installation and runs on any processor with AVX2;
    `native` was compiled by `headrace engine build` for this machine's processor, and is faster where that has AVX-512."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=512)] | None = None
    """Compute threads; left out, one less than the processor has cores."""
    kv_layout: Literal["per_sequence", "unified"] = "per_sequence"
    """`per_sequence` gives each request a fixed part of the KV memory; `unified` lets them share all of it, slower."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=64, le=268_435_456)] | None = None
    """Most tokens that a worker's requests and kept prefixes hold together; left out, `max_batch_size` times
    `max_context_tokens`. With fewer, requests wait, and running ones may be stopped and gone on with later. With `kv_layout:
    unified` only so much memory is reserved (rounded up to 256 tokens); with `per_sequence` all of it is reserved anyway,
    and this only bounds how much of it is in use."""
    flash_attention: bool = True
    """Fused attention: llama.cpp's kernel, or headrace's in a library compiled for a processor with AVX-512."""
    prefix_cache: bool = True
    """Keep the KV memory of finished requests, and take over what a tenant's next prompt has in common with it."""
    cache_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=604_800)] = 600.0
    """How long something is kept that nobody asks for."""
    parking_mib: Annotated[int, msgspec.Meta(ge=0, le=1_048_576)] = 512
    """Most space for KV memory put aside in files under the data directory when its slot is needed; it outlives the
    worker. 0 puts nothing aside."""
    reproducible: bool = False
    """Make an answer depend on its request alone, not on what else runs or is cached: prompts are computed in aligned
    portions of 64 tokens, and only such portions are taken over. Needs Q8_0 weights (Q4_1 files are rewritten so),
    `kv_layout: per_sequence`, flash attention and one thread: with several, a lone long sequence is computed in another way than one among others."""
    normalize_whitespace: bool = False
    """Prompts that differ only in spaces, tabs and blank lines become the same, so that they share what is kept."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the template in the model file."""
    stub: StubTiming | None = None
    """Use the stub engine instead of the model. For load tests only."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn where a request does not say. Without settings these are the API's own."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    """0 always takes the most probable token."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Draw from the smallest set of tokens with so much probability."""
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Draw from so many of the most probable tokens; 0 from all."""


BUILTIN_SAMPLING = SamplingDefaults(temperature=0.2, top_p=0.9)
"""What the built-in model's publisher recommends; at temperature 1 so small a model talks nonsense."""


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much memory a request is taken to need, for limits of `gpu_memory_gb`. MB are 1024 KB."""

    base_mb: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 128.0
    """For the request itself."""
    mb_per_token: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] = 1.2
    """For each token of prompt and answer."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that clients can ask for: a GGUF file served by our own workers, or a foreign upstream."""

    id: ModelId
    path: str | None = None
    """A GGUF file. `builtin` is the model that comes with the installation."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=64, description="worker processes for this model")] = 1
    engine: EngineSettings = EngineSettings()
    limits: Limits = UNLIMITED
    """What all requests for this model together may take."""
    scheduling: SchedulingSettings = SchedulingSettings()
    """Who is next when more is asked of the model than it can do."""
    dedicated_workers: dict[str, Annotated[int, msgspec.Meta(ge=1, le=64)]] = {}
    """Workers set aside, by tenant: `{acme: 1}`. They serve only that tenant, whose `isolation` has to be `dedicated`;
    together they are fewer than `workers`."""
    degrade_to: str | None = None
    """A cheaper model, of this list, for requests that find no place here, if their tenant's `allow_degrade` is set and
    they do not forbid it."""
    memory: MemorySettings | None = None
    """What a request is taken to need. Left out: of our own workers what the model's KV geometry says, exactly; of
    upstreams, and before the first worker is ready, the defaults."""
    sampling: SamplingDefaults | None = None
    """Left out: the API's defaults; for the built-in model temperature 0.2 and top_p 0.9."""
    upstream: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s?#]+$")] | None = None
    """Base URL of an OpenAI-compatible server, up to and including `/v1`."""
    upstream_model: str | None = None
    """The name the upstream knows the model by; left out, the same as `id`."""
    upstream_key_env: str | None = None
    """Environment variable that holds the upstream's API key."""
    max_concurrent_requests: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """Requests in an upstream at once; the rest waits in headrace's queue. Embedded workers are bounded by
    `engine.max_batch_size`."""

    @property
    def worker_ids(self) -> list[str]:
        """The names of its workers, which stay the same over restarts."""
        return [f"{self.id}-{number}" for number in range(self.workers)]

    @property
    def can_preempt(self) -> bool:
        """Whether a running request can be stopped for another and gone on with. An upstream cannot be told to, and a
        static batch runs to its end.
        """
        return self.upstream is None and self.engine.batching == "continuous"

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        if self.sampling is not None:
            return self.sampling
        return BUILTIN_SAMPLING if self.path == BUILTIN_PATH else SamplingDefaults()


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounded queue in front of each model's workers."""

    length: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = bounds.QUEUE_LENGTH_DEFAULT
    """Most requests waiting for one model; the next is refused with 429 `queue_full`."""
    tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)] = bounds.QUEUE_TOKENS_DEFAULT
    """Most tokens (prompts and longest answers) waiting for one model. When the queue is full, the tenant with the
    most waiting tokens gives up its newest request to another tenant's; its own next one is refused."""
    tenant_length: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    """Most requests of one tenant waiting for one model; left out, as many as `length`."""
    tenant_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)] | None = None
    """Most tokens of one tenant waiting for one model; left out, as many as `tokens`."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = bounds.QUEUE_SECONDS_DEFAULT
    """Most time a request waits; then 429 `queue_timeout`."""


class LedgerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of every operation."""

    durability: Literal["os", "fsync"] = "os"
    """`os`: a record survives the death of any process; `fsync`: also a power cut."""
    abort_policy: Literal["generated", "delivered", "free_on_error"] = "generated"
    """What a request that was not completed is charged. `generated`: what the engine computed and generated;
    `delivered`: of the answer only what the client's connection got, and nothing if it got nothing;
    `free_on_error`: nothing where the fault is the server's or the engine's, else as `generated`."""
    refusals_per_s: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 50
    """Refusals of one tenant, key, model and error code that are recorded one by one in a second. Beyond it they
    are summed up: one record for the rest of that second."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines of this weight and above. One line for each request is `info`."""
    format: Literal["json", "console"] = "json"
    """`json`: one object a line; `console`: for reading in a terminal."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `headrace serve` can be told."""

    data: str = ".data"
    """Directory of ledger, keys and tenants. One server at a time."""
    host: str = "127.0.0.1"
    """Address of the API. `0.0.0.0` listens on all; put TLS in front of it then."""
    port: Port = 8080
    admin_host: str = "127.0.0.1"
    """Address of the admin API."""
    admin_port: Port = 8081
    metrics_host: str = "127.0.0.1"
    """Address of all metrics, the workers' too."""
    metrics_port: Port = 0
    models: Annotated[list[ModelSettings], msgspec.Meta(max_length=256)] = []
    """Left out: the built-in model, one worker."""
    limits: Limits = UNLIMITED
    """What all requests of all tenants together may take. Tenants and keys have limits of their own."""
    default_max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096
    """Most tokens of an answer for which the client set no maximum; the context and the limits may make it less."""
    require_max_tokens: bool = False
    """Refuse requests that set no maximum, instead of choosing one."""
    queue: QueueSettings = QueueSettings()
    headers_after_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 5_000
    """A stream's headers wait so long for a worker, so that a refusal keeps its status; then keep-alives."""
    keep_alive_ms: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 10_000
    """Time between keep-alive comments on a stream that has nothing to say yet."""
    request_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0
    """Most time from a worker's grant to the end of the answer."""
    session_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=604_800)] = 1200.0
    """A session, and what is kept of a conversation, ends after so long without a request."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 30.0
    """A request on a worker that nobody has seen alive for so long is ended and what it holds is given back; its
    record is posted should it still come."""
    memory_throttle_s: Annotated[float, msgspec.Meta(ge=0, le=604_800)] = 600.0
    """For so long a refusal by `gpu_memory_gb` slows down the tenant, department, user or key whose limit it was: requests
    that find no memory wait for it, at half the share, and are not refused. 0 slows nobody down."""
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 30.0
    """How long a stopping server waits for running requests."""
    worker_step_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 120.0
    """A worker whose engine is stuck in one step for longer is killed and started anew."""
    worker_start_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 300.0
    """A worker that is not ready after so long is killed and started anew. Large models need longer to load."""
    ledger: LedgerSettings = LedgerSettings()
    log: LogSettings = LogSettings()
