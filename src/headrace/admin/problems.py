"""Errors of the admin API as RFC 9457 problem details, every code in one table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.responses import Response

from headrace.errors import HeadraceError

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:headrace:problem:"

TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        # the request
        "malformed_body": "The body is not the JSON object this route takes",
        "missing_field": "A required field is missing",
        "unknown_field": "A field or query parameter is not known",
        "invalid_value": "A field has the wrong type or an impossible value",
        "not_supported_yet": "A field of the contract that this version does not enforce yet",
        "headers_too_large": "The head of the request is too large",
        "body_too_large": "The body is too large",
        "body_too_slow": "The body took too long",
        "not_found": "There is no such route",
        "method_not_allowed": "The route does not take this method",
        # who asks
        "invalid_key": "No admin key, or one that is not accepted",
        "missing_scope": "The key lacks the scope for this",
        # tenants and keys
        "invalid_tenant_id": "Not a tenant id",
        "invalid_name": "Not a name",
        "invalid_status": "Not a status",
        "invalid_cache": "Not what a cache can keep of a tenant",
        "invalid_shared_prefix": "Not a name to share prefixes under",
        "invalid_user": "Not a user",
        "invalid_entry": "Not the name of a department, user or model",
        "too_many_entries": "The tenant has too many departments, users or models with limits",
        "department_not_found": "The tenant has no such department",
        "department_in_use": "Keys in force belong to the department",
        "invalid_scope": "A scope is not known",
        "invalid_lifetime": "Not a lifetime for a key",
        "invalid_limit": "Not a page size",
        "invalid_after": "Not a place to continue from",
        "tenant_exists": "The tenant exists already",
        "tenant_not_found": "There is no such tenant",
        "key_not_found": "There is no such key",
        "signing_key_active": "The signing key is in use",
        "signing_key_not_found": "There is no such signing key",
        # models
        "model_not_found": "There is no such model",
        # usage
        "invalid_filter": "A filter of the report cannot be understood",
        "operation_not_found": "There is no final record of such an operation",
        "operation_open": "The operation has not ended",
        "already_refunded": "The operation was refunded before",
        "invalid_reason": "Not a reason",
        "report_too_long": "The report takes too long",
        # the server
        "core_unavailable": "The core does not answer",
        "store_unavailable": "The disk does not take or give data",
        "internal_error": "Something went wrong inside",
    }
)
"""Title by `code`. `type` is the code behind `urn:headrace:problem:`."""


class Problem(HeadraceError):
    """An answer that is an error. `detail` never holds keys or what a key may do."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        assert code in TITLES, code
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.param = param
        self.headers = dict(headers or {})

    def response(self, request_id: str) -> Response:
        """The reply. `param` is there when one field is at fault."""
        body: dict[str, Any] = {
            "type": TYPE_PREFIX + self.code,
            "title": TITLES[self.code],
            "status": self.status,
            "detail": self.detail,
            "instance": f"urn:headrace:request:{request_id}",
            "code": self.code,
            "param": self.param,
        }
        return Response(
            msgspec.json.encode(body),
            status_code=self.status,
            headers=self.headers,
            media_type=MEDIA_TYPE,
        )
