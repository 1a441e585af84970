"""AU-7: the scopes a key can carry."""

import pytest

from headrace.identity import ADMIN_KEY, DEFAULT_SCOPES, TENANT_KEY, UnknownScope, checked_scopes
from headrace.identity.scopes import SCOPES, allowed_scopes


def test_every_scope_belongs_to_one_kind_of_key() -> None:
    assert sorted(allowed_scopes(TENANT_KEY) + allowed_scopes(ADMIN_KEY)) == sorted(SCOPES)
    assert allowed_scopes(ADMIN_KEY) == ("admin:*",)


def test_the_defaults_are_allowed() -> None:
    assert checked_scopes(DEFAULT_SCOPES) == DEFAULT_SCOPES


def test_repetitions_are_dropped() -> None:
    assert checked_scopes(["chat:read", "chat:stream", "chat:read"]) == ("chat:read", "chat:stream")


@pytest.mark.parametrize("scopes", [[], ["chat"], ["chat:read", "chat:*"], ["admin:*"], ["CHAT:READ"], [""]])
def test_others_are_refused_with_the_list_of_allowed_ones(scopes: list[str]) -> None:
    with pytest.raises(UnknownScope) as refusal:
        checked_scopes(scopes)
    assert all(scope in str(refusal.value) for scope in allowed_scopes(TENANT_KEY))


def test_the_refusal_is_short_however_long_the_scope() -> None:
    with pytest.raises(UnknownScope) as refusal:
        checked_scopes(["x" * 100_000] * 3)
    assert len(str(refusal.value)) < 1000


def test_admin_keys_carry_no_scopes_of_tenants() -> None:
    with pytest.raises(UnknownScope):
        checked_scopes(["chat:read"], ADMIN_KEY)
