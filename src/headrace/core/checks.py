"""What tenants and keys may be called and how long keys may live. Violations are `ControlFailure` 400."""

import re
from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

import msgspec

from headrace import bounds
from headrace.caching.slots import Mode
from headrace.config.limits import Limits
from headrace.config.scheduling import Sharing, SharingValues
from headrace.core.failure import ControlFailure

TENANT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.ASCII)
NAME_CHARACTERS_MAX: Final = 128
REASON_CHARACTERS_MAX: Final = 256
PAGE_SIZE_MAX: Final = 1000
DAY_SECONDS: Final = 86_400
KEY_LIFETIME_SECONDS_DEFAULT: Final = 90 * DAY_SECONDS
"""A key made without `expires_in_s` lives for 90 days."""
KEY_LIFETIME_SECONDS_MAX: Final = 3650 * DAY_SECONDS
"""Ten years."""
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def check_tenant_id(tenant_id: str) -> None:
    """Lower-case letters, digits, `-` and `_`, at most 63, starting with a letter or digit."""
    if TENANT_ID.fullmatch(tenant_id) is None:
        raise ControlFailure(
            400,
            "invalid_tenant_id",
            "a tenant id has 1 to 63 of the characters a-z, 0-9, - and _, and starts with a letter or digit",
            "id",
        )


def check_name(name: str | None) -> None:
    """Free text for people, on one line."""
    if name is None:
        return
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or _CONTROL_CHARACTERS.search(name):
        raise ControlFailure(
            400, "invalid_name", f"a name is one line of 1 to {NAME_CHARACTERS_MAX} characters", "name"
        )


def checked_status(status: str) -> Literal["active", "disabled"]:
    """Whether a tenant's keys are accepted."""
    if status not in ("active", "disabled"):
        raise ControlFailure(400, "invalid_status", "status is active or disabled", "status")
    return cast(Literal["active", "disabled"], status)


def checked_cache(cache: str) -> Mode:
    """What the prefix cache may keep of a tenant's requests."""
    if cache not in get_args(Mode):
        raise ControlFailure(400, "invalid_cache", f"cache is one of {', '.join(get_args(Mode))}", "cache")
    return cast(Mode, cache)


def check_shared_prefix(name: str | None) -> None:
    """The name under which tenants share marked prefixes: one line, at most `SHARED_PREFIX_CHARACTERS_MAX`."""
    if name is None:
        return
    if not 1 <= len(name) <= bounds.SHARED_PREFIX_CHARACTERS_MAX or _CONTROL_CHARACTERS.search(name):
        raise ControlFailure(
            400,
            "invalid_shared_prefix",
            f"shared_prefix is one line of 1 to {bounds.SHARED_PREFIX_CHARACTERS_MAX} characters, or null",
            "shared_prefix",
        )


def check_user(user: str | None) -> None:
    """The end user a key is bound to: one line, at most `USER_BYTES_MAX` bytes in UTF-8."""
    if user is None:
        return
    if _CONTROL_CHARACTERS.search(user) or not 1 <= len(user.encode()) <= bounds.USER_BYTES_MAX:
        raise ControlFailure(
            400, "invalid_user", f"a user is one line of 1 to {bounds.USER_BYTES_MAX} bytes", "user"
        )


def check_department(department: str, field: str) -> None:
    """The name of a department: one line, at most `DEPARTMENT_BYTES_MAX` bytes in UTF-8."""
    _check_entry(department, field, "a department", bounds.DEPARTMENT_BYTES_MAX)


def check_limited_user(user: str, field: str) -> None:
    """A user that is given limits: as in keys and requests."""
    _check_entry(user, field, "a user", bounds.USER_BYTES_MAX)


def check_limited_model(model: str, field: str) -> None:
    """A model's id. It need not be served now: models come and go."""
    _check_entry(model, field, "a model's id", bounds.MODEL_NAME_BYTES_MAX)


def _check_entry(name: str, field: str, what: str, bytes_max: int) -> None:
    if _CONTROL_CHARACTERS.search(name) or not 1 <= len(name.encode()) <= bytes_max:
        raise ControlFailure(
            400, "invalid_entry", f"{field}: {what} is one line of 1 to {bytes_max} bytes", field
        )


def check_reason(reason: str) -> None:
    """Why an administrator corrected something, for the record: text on one line."""
    if not 1 <= len(reason) <= REASON_CHARACTERS_MAX or _CONTROL_CHARACTERS.search(reason):
        raise ControlFailure(
            400,
            "invalid_reason",
            f"a reason is one line of 1 to {REASON_CHARACTERS_MAX} characters",
            "reason",
        )


def checked_lifetime(expires_in_s: int | None) -> int:
    """Seconds a new key lives, the default filled in."""
    if expires_in_s is None:
        return KEY_LIFETIME_SECONDS_DEFAULT
    if not 1 <= expires_in_s <= KEY_LIFETIME_SECONDS_MAX:
        raise ControlFailure(
            400,
            "invalid_lifetime",
            f"expires_in_s is 1 to {KEY_LIFETIME_SECONDS_MAX} (ten years); "
            f"left out it is {KEY_LIFETIME_SECONDS_DEFAULT} (90 days)",
            "expires_in_s",
        )
    return expires_in_s


def check_page_size(limit: int) -> None:
    """Lists come in pages, so that an answer fits into one frame."""
    if not 1 <= limit <= PAGE_SIZE_MAX:
        raise ControlFailure(400, "invalid_limit", f"limit is 1 to {PAGE_SIZE_MAX}", "limit")


def merged_sharing(old: Sharing, changes: SharingValues) -> Sharing:
    """A tenant's part in sharing with these changes; `None` goes back to the default. Raises `ControlFailure` 400."""
    merged = {**msgspec.structs.asdict(old), **changes}
    given = {name: value for name, value in merged.items() if value is not None}
    try:
        return msgspec.convert(given, Sharing)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("`$.")[2].rstrip("`") or None
        raise ControlFailure(400, "invalid_value", str(error).replace("`$.", "`"), field) from error


def merged_limits(old: Limits, changes: Mapping[str, float | None], field: str = "limits") -> Limits:
    """The limits with these changes; `None` takes one away. Raises `ControlFailure` 400 about `field`."""
    if not changes:
        return old
    merged = {**msgspec.to_builtins(old), **changes}
    given = {name: value for name, value in merged.items() if value is not None}
    try:
        return msgspec.convert(given, Limits, strict=False)
    except msgspec.ValidationError as error:
        raise ControlFailure(400, "invalid_value", f"{field}: {error}", field) from error
