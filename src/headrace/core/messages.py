"""What the admin process may ask the core, and what comes back.

The core owns tenants, keys and workers. The admin process (its own port, free to crash) talks to it
over a private Unix socket with these messages, one reply for each request, in any order.
"""

from typing import Any

import msgspec

from headrace.config.limits import NO_CHANGES, UNLIMITED, LevelChanges, Limits, LimitValues
from headrace.config.scheduling import Isolation, SchedulingSettings, ServiceClass, SharingValues
from headrace.ledger.records import OperationRecord
from headrace.request.controls import Controls


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant as the admin API shows it. Times in microseconds since 1970 UTC."""

    id: str
    name: str | None = None
    status: str = "active"
    """`active` or `disabled`: a disabled tenant's keys are refused."""
    created_ts: int
    updated_ts: int
    version: int
    """Counts the changes to this tenant, from 1."""
    cache: str = "full"
    """What the prefix cache keeps of its requests: `full`, `prefix_only` or `off`."""
    shared_prefix: str | None = None
    """Tenants of the same name share the prefixes that their requests mark."""
    weight: float = 1.0
    service_class: ServiceClass = "interactive"
    priority_max: int = 0
    isolation: Isolation = "weighted"
    allow_degrade: bool = False
    limits: Limits = UNLIMITED
    departments: dict[str, Limits] = {}
    user_limits: Limits = UNLIMITED
    users: dict[str, Limits] = {}
    model_limits: dict[str, Limits] = {}


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a key: its claims, never the key itself."""

    jti: str
    kind: str = "tenant"
    """`tenant`, or `admin` for keys of the admin API."""
    tenant: str
    """Empty for admin keys."""
    department: str | None = None
    user: str | None = None
    name: str | None = None
    scopes: tuple[str, ...]
    created_ts: int
    expires_ts: int
    revoked_ts: int | None = None
    limits: Limits = UNLIMITED


class IssuedKey(msgspec.Struct, frozen=True, kw_only=True):
    """The only time the key itself is seen."""

    key: str
    view: KeyView


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as of now."""

    id: str
    model: str
    kind: str
    """`embedded` or `upstream`."""
    status: str
    """`starting`, `ready`, `draining`, `down`."""
    address: str
    pid: int | None = None
    slots: int
    running: int
    restarts: int
    ready_ts: int | None = None
    last_error: str | None = None
    metrics_url: str | None = None
    engine: dict[str, Any] | None = None


class CreateTenant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    name: str | None = None
    cache: str = "full"
    shared_prefix: str | None = None
    sharing: SharingValues = {}
    limits: Limits = UNLIMITED
    levels: LevelChanges = NO_CHANGES


class UpdateTenant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    name: str | msgspec.UnsetType | None = msgspec.UNSET
    status: str | msgspec.UnsetType = msgspec.UNSET
    cache: str | msgspec.UnsetType = msgspec.UNSET
    shared_prefix: str | msgspec.UnsetType | None = msgspec.UNSET
    sharing: SharingValues = {}
    limits: LimitValues | msgspec.UnsetType = msgspec.UNSET
    levels: LevelChanges = NO_CHANGES


class GetTenant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str


class ListTenants(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One page: the tenants after the one with id `after`, in the order of their ids.

    Tenants with thousands of departments and users make a page shorter than `limit`.
    """

    after: str | None = None
    limit: int = 1000


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    tenant: str
    department: str | None = None
    user: str | None = None
    name: str | None = None
    scopes: tuple[str, ...] | None = None
    expires_in_s: int | None = None
    limits: Limits = UNLIMITED


class RevokeKey(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    jti: str


class ListKeys(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One page: the keys made after the one with `jti` `after`, oldest first."""

    tenant: str | None = None
    after: str | None = None
    limit: int = 1000


class CheckAdminKey(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Is this verified admin key still in force? Answered by `Done` or a 401 `Failure`."""

    jti: str


class ListWorkers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class ListQueues(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What waits, and why; of each model the first `limit` requests. `model` None: of all."""

    model: str | None = None
    limit: int = 100


class ListModels(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


ModelChanges = dict[str, bool | int | float | str | None]
"""Of `Controls` and `SchedulingSettings`, by name."""


class UpdateModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change how a model is served, until the server ends. What is None goes back to the settings."""

    id: str
    changes: ModelChanges


class FlushLedger(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered when everything recorded so far can be read by another process."""


class RefundOperation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take back what an operation that has ended is charged. Answered when that is durable."""

    request_id: str
    reason: str


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request that was not carried out. `status` is the HTTP status to answer with."""

    status: int
    code: str
    message: str
    param: str | None = None


class TenantReply(msgspec.Struct, frozen=True, tag=True):
    tenant: TenantView


class TenantsReply(msgspec.Struct, frozen=True, tag=True):
    tenants: list[TenantView]
    has_more: bool = False


class KeyReply(msgspec.Struct, frozen=True, tag=True):
    key: KeyView


class IssuedKeyReply(msgspec.Struct, frozen=True, tag=True):
    issued: IssuedKey


class KeysReply(msgspec.Struct, frozen=True, tag=True):
    keys: list[KeyView]
    has_more: bool = False


class WorkersReply(msgspec.Struct, frozen=True, tag=True):
    workers: list[WorkerView]


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it is served now."""

    id: str
    replicas: int
    running: int
    waiting: int
    controls: Controls
    """What was changed of its workers since the start."""
    scheduling: SchedulingSettings
    """How its queue decides now."""


class ModelsReply(msgspec.Struct, frozen=True, tag=True):
    models: list[ModelView]


class TenantQueueView(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant, or all of isolation `shared` together (`@shared`), has of a model."""

    tenant: str
    waiting: int
    running: int
    weight: float
    share: float
    """Of the weights of all who wait, 0 to 1; 0 for one that has nothing waiting."""
    lead: float
    """Cost, by weight, that its counter is above the lowest of those who wait."""
    received_60s: float
    """Cost of what was computed for it in the last minute."""


class WaitingView(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting request."""

    request_id: str
    tenant: str
    api_key_id: str
    position: int
    is_position_exact: bool
    waited_ms: int
    reason: str
    reason_text: str
    is_throttled: bool
    """It came while a limit of memory slowed its caller down."""
    share: float
    service_class: ServiceClass
    priority: int
    tokens: int
    """Held: prompt and longest answer."""


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A model's queue, as of now."""

    model: str
    policy: str
    length: int
    length_max: int
    tokens: int
    tokens_max: int
    waiting_by_class: dict[str, int]
    running: int
    places: int
    """On all replicas that are ready."""
    tenants_waiting: int
    jain_index: float
    tenants: list[TenantQueueView]
    """Who has most waiting first, cut."""
    requests: list[WaitingView]
    """The first ones in the expected order."""


class QueuesReply(msgspec.Struct, frozen=True, tag=True):
    queues: list[QueueView]


class OperationReply(msgspec.Struct, frozen=True, tag=True):
    """The final record as it stands now."""

    operation: OperationRecord


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


Request = (
    CreateTenant
    | UpdateTenant
    | GetTenant
    | ListTenants
    | CreateKey
    | RevokeKey
    | ListKeys
    | CheckAdminKey
    | ListWorkers
    | ListModels
    | ListQueues
    | UpdateModel
    | FlushLedger
    | RefundOperation
)
Reply = (
    Failure
    | TenantReply
    | TenantsReply
    | KeyReply
    | IssuedKeyReply
    | KeysReply
    | WorkersReply
    | ModelsReply
    | QueuesReply
    | OperationReply
    | Done
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A request with the number its reply will carry."""

    number: int
    request: Request
    actor: str = ""
    """The `jti` of the admin key on whose behalf this is asked, for the record of changes."""


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    number: int
    reply: Reply
