"""ME-8, UX-1: the filters of a report, good and bad."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admin.usage_query import PARAMETERS, BadQuery, parse_query
from headrace.store.reports import GROUPS, UsageQuery

DAY_US = 1_790_812_800_000_000
"""2026-10-01."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-10-01", DAY_US),
        ("2026-10-01T00:00:00Z", DAY_US),
        ("2026-10-01T12:30:00", DAY_US + 45_000_000_000),
        ("2026-10-01T02:00:00+02:00", DAY_US),
        ("2026-10-01T00:00:00.000001Z", DAY_US + 1),
        (str(DAY_US), DAY_US),
        ("0", 0),
        ("1970-01-01", 0),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert parse_query({"from": text}).from_us == expected


@pytest.mark.parametrize(
    "text", ["", "yesterday", "-1", "1.5", "2026-13-01", "1969-12-31", "1" * 18, "2026-10-01T25:00", "\u0661"]
)
def test_bad_times_name_the_field_and_what_is_allowed(text: str) -> None:
    for field in ("from", "to"):
        with pytest.raises(BadQuery) as refusal:
            parse_query({field: text})
        assert refusal.value.field == field
        assert "2026-10-01T12:00:00Z" in str(refusal.value) or "1970" in str(refusal.value)


def test_all_filters() -> None:
    query = parse_query(
        {
            "tenant": "demo",
            "key": "key_1",
            "model": "smol",
            "from": "1",
            "to": "2",
            "group_by": "day, model,day",
        }
    )
    assert query == UsageQuery(
        tenant="demo", key="key_1", model="smol", from_us=1, to_us=2, group_by=("day", "model")
    )


@pytest.mark.parametrize("text", ["", "week", "tenant,,model", "tenant;drop", "tenant_id"])
def test_bad_groups_are_refused_with_those_allowed(text: str) -> None:
    with pytest.raises(BadQuery) as refusal:
        parse_query({"group_by": text})
    assert refusal.value.field == "group_by"
    assert all(name in str(refusal.value) for name in GROUPS)


def test_an_empty_range_is_refused() -> None:
    for to in ("5", "4"):
        with pytest.raises(BadQuery) as refusal:
            parse_query({"from": "5", "to": to})
        assert refusal.value.field == "to"


def test_unknown_filters_are_refused_with_those_allowed() -> None:
    with pytest.raises(BadQuery) as refusal:
        parse_query({"tenants": "demo"})
    assert refusal.value.field == "tenants"
    assert all(name in str(refusal.value) for name in PARAMETERS)


@given(st.dictionaries(st.sampled_from(PARAMETERS), st.text(max_size=30)))
def test_any_text_is_understood_or_refused(parameters: dict[str, str]) -> None:
    try:
        query = parse_query(parameters)
    except BadQuery as refusal:
        assert refusal.field in parameters
    else:
        assert isinstance(query, UsageQuery)
