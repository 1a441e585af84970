"""What may stand in bodies and query strings, and how violations read.

Bodies are parsed here and not by FastAPI, so that each error names its field and what is allowed there;
the models go into the OpenAPI document all the same.
"""

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from headrace.admin.problems import Problem
from headrace.caching.slots import Mode
from headrace.config.limits import LevelChanges, Limits, LimitValues
from headrace.config.scheduling import Isolation, PolicyName, ServiceClass, Sharing, SharingValues

LIMITS_NOT_SUPPORTED_YET: Final = frozenset(
    {"tokens_per_day", "tokens_per_month", "cost_per_day", "cost_per_month"}
)
NOT_SUPPORTED_YET: Final = frozenset({"quota"})
"""Fields of the API's contract (UX-1) that would be ignored today, so they are refused."""


WholeNumber = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""What JSON and MessagePack both carry exactly; the core checks what the number is worth."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class _TenantBody(_Body):
    name: str | None = None
    cache: Mode = "full"
    """What the prefix cache keeps of finished requests: everything, what they mark, or nothing."""
    shared_prefix: str | None = None
    """Tenants of the same name share the prefixes that their requests mark with `cache_control`."""
    weight: float | None = None
    """Twice the weight is twice the service while both wait; null is 1."""
    service_class: ServiceClass | None = None
    """Of requests that say nothing else; a `batch` tenant's cannot become interactive."""
    priority_max: WholeNumber | None = None
    """Requests may ask for a priority up to this; a higher one is lowered to it. null is 0."""
    isolation: Isolation | None = None
    """`weighted`: a queue of its own; `shared`: one together with all of that mode; `dedicated`: workers of its own."""
    allow_degrade: bool | None = None
    """A request that would be refused may be served with less: a shorter answer, or a cheaper model."""
    limits: LimitValues = {}
    departments: dict[str, LimitValues | None] = {}
    """Each with its limits; `{}` is a department without any."""
    user_limits: LimitValues = {}
    """Of every single user."""
    users: dict[str, LimitValues | None] = {}
    """Of particular users, in place of `user_limits` limit by limit."""
    model_limits: dict[str, LimitValues | None] = {}
    """Of what the tenant may take of one model."""


class TenantCreate(_TenantBody):
    """A new tenant. Limits left out are unlimited."""

    id: str


class TenantUpdate(_TenantBody):
    """Only what is given changes; `name: null` takes the name away, `shared_prefix: null` ends the sharing, `limits: {"tpm": null}`
    takes that limit away.

    Departments, users and models that are not named stay; `departments: {"sales": null}` takes one away.
    """

    status: Literal["active", "disabled"] = "active"


class KeyCreate(_Body):
    """A new key. Without `scopes` it may chat, stream, embed and read usage; it lives 90 days."""

    tenant: str
    department: str | None = None
    user: str | None = None
    name: str | None = None
    scopes: list[str] | None = None
    expires_in_s: WholeNumber | None = None
    limits: LimitValues = {}


class ModelUpdate(_Body):
    """How a model's replicas work and who is next, from now on until the server ends; null goes back to the settings."""

    max_batch_size: WholeNumber | None = None
    max_batch_tokens: WholeNumber | None = None
    target_step_ms: float | None = None
    idle_step_ms: float | None = None
    batch_wait_ms: float | None = None
    max_concurrent_requests: WholeNumber | None = None
    scheduler_policy: PolicyName | None = None
    input_cost: float | None = None
    output_cost: float | None = None
    cached_input_cost: float | None = None
    batch_floor: float | None = None
    batch_aging_s: float | None = None
    priority_aging_s: float | None = None
    token_aging_ms: float | None = None
    locality_quantum: float | None = None
    locality_slack: float | None = None
    long_prompt_tokens: WholeNumber | None = None
    long_prompts_max: WholeNumber | None = None
    interactive_reserve: WholeNumber | None = None
    reserve_output_tokens_max: WholeNumber | None = None
    preemption: bool | None = None


class RefundCreate(_Body):
    """Why the charge is taken back; it goes into the ledger and onto the record of changes."""

    reason: str


B = TypeVar("B", bound=BaseModel)


async def body_of(request: Request, model: type[B]) -> B:
    """The body as a model. Raises `Problem` 400."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        raise _bad_body(errors, model) from error


def levels_of(body: TenantCreate | TenantUpdate) -> LevelChanges:
    """What a body says of departments, users and models. Raises `Problem` 400 as `limits_of` does."""
    limits_of(body.user_limits, "user_limits")
    for field in ("departments", "users", "model_limits"):
        for name, values in getattr(body, field).items():
            limits_of(values or {}, f"{field}.{name[:64]}")
    return LevelChanges(
        departments=body.departments,
        user_limits=body.user_limits,
        users=body.users,
        model_limits=body.model_limits,
    )


def sharing_of(body: TenantCreate | TenantUpdate) -> SharingValues:
    """What a body says of the tenant's part in sharing. The core checks what the values are worth."""
    return {name: getattr(body, name) for name in Sharing.__struct_fields__ if name in body.model_fields_set}


def limits_of(values: LimitValues, field: str = "limits") -> Limits:
    """The limits that are set. Raises `Problem` 400 for unknown names and values out of range."""
    for name in values:
        if name in LIMITS_NOT_SUPPORTED_YET:
            raise Problem(
                400,
                "not_supported_yet",
                f"{field}.{name} is not enforced by this version yet, so it is not accepted either; "
                f"allowed are {', '.join(Limits.__struct_fields__)}",
                param=f"{field}.{name}",
            )
        if name not in Limits.__struct_fields__:
            raise Problem(
                400,
                "unknown_field",
                f"unknown limit {f'{field}.{name[:64]}'!r}; allowed are {', '.join(Limits.__struct_fields__)}",
                param=f"{field}.{name[:64]}",
            )
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return msgspec.convert(given, Limits)
    except msgspec.ValidationError as error:
        raise Problem(400, "invalid_value", f"{field}: {error}", param=field) from error


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The same model for the OpenAPI document."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": model.model_json_schema()}},
        }
    }


def query_of(request: Request, allowed: tuple[str, ...]) -> dict[str, str]:
    """The query parameters, each at most once. Raises `Problem` 400."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            allowed_text = ", ".join(allowed) or "none"
            raise Problem(
                400,
                "unknown_field",
                f"unknown query parameter {name[:64]!r}; allowed are {allowed_text}",
                param=name[:64],
            )
        if name in found:
            raise Problem(400, "invalid_value", f"{name} is given more than once", param=name)
        found[name] = value
    return found


def page_of(query: dict[str, str]) -> tuple[str | None, int]:
    """`after` and `limit` of a list. The core checks what they are worth."""
    return query.get("after"), limit_of(query, default=1000)


def limit_of(query: dict[str, str], *, default: int) -> int:
    """`limit` of a list. The core checks what it is worth."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 9):
        raise Problem(400, "invalid_limit", "limit is a whole number", param="limit")
    return int(limit)


_NUMBERS: Final = ("int", "float")
"""How pydantic ends the place of an error where either may stand."""


def _field_of(place: tuple[str | int, ...]) -> str:
    if len(place) > 1 and place[-1] in _NUMBERS:
        place = place[:-1]
    return ".".join(map(str, place))


def _bad_body(errors: list[Any], model: type[BaseModel]) -> Problem:
    """The first error; fields that are not supported yet before all others."""
    by_field = {_field_of(error["loc"]): error for error in errors}
    allowed = ", ".join(model.model_fields)
    for field, error in by_field.items():
        if error["type"] == "extra_forbidden" and field in NOT_SUPPORTED_YET:
            return Problem(
                400,
                "not_supported_yet",
                f"{field} is not enforced by this version yet, so it is not accepted either; allowed are {allowed}",
                param=field,
            )
    field, error = next(iter(by_field.items()))
    shown = field[:64]
    match error["type"]:
        case "json_invalid" | "model_type" | "model_attributes_type":
            return Problem(400, "malformed_body", f"the body has to be a JSON object with {allowed}")
        case "extra_forbidden":
            return Problem(
                400, "unknown_field", f"unknown field {shown!r}; allowed are {allowed}", param=shown
            )
        case "int_type" | "float_type" if error["loc"][-1] in _NUMBERS:
            return Problem(400, "invalid_value", f"{shown}: not a number or null", param=shown)
        case "missing":
            return Problem(400, "missing_field", f"{shown} is required", param=shown)
        case _:
            return Problem(400, "invalid_value", f"{shown}: {error['msg']}", param=shown)
