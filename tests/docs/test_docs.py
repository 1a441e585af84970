"""The documentation says what the code does."""

import re
from pathlib import Path

import pytest
from tools import reference

from headrace import bounds
from headrace.api import refusals

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("name", sorted(reference.pages()))
def test_reference_pages_are_what_the_code_says(name: str) -> None:
    written = (reference.REFERENCE / name).read_text(encoding="utf-8")
    assert written == reference.pages()[name], "run: python tools/reference.py"


def test_every_setting_has_a_meaning() -> None:
    rows = [line for line in reference.settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    assert [row for row in rows if not row.rstrip("|").rsplit("|", 1)[1].strip()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_refusal_stands_in_the_life_of_a_request() -> None:
    text = (ROOT / "docs/life-of-a-request.md").read_text(encoding="utf-8")
    codes = {refusal.code for refusal in reference.every_refusal()}
    named_otherwise = {"request_not_found"}  # of GET /v1/usage, not of a chat
    shown = {code for code in codes if code in text}
    by_status = {"invalid_body", "unknown_field", "unsupported_field", "route_not_found", "method_not_allowed",
                 "unsupported_media_type", "rate_limit_exceeded", "upstream_refused", "upstream_error"}  # fmt: skip
    assert codes - shown - by_status == named_otherwise


def test_no_page_names_a_registry_or_a_path_of_a_machine() -> None:
    forbidden = re.compile(r"pypi\.org|pythonhosted|npmjs|/work/|/root/|/home/")
    for page in PAGES:
        assert not forbidden.search(page.read_text(encoding="utf-8")), page


def test_a_refusal_never_says_whether_a_key_exists() -> None:
    assert refusals.invalid_key().message == refusals.invalid_key().message
    assert not re.search("expired|revoked|unknown", refusals.invalid_key().message)


def test_the_bounds_on_a_request_are_in_the_api_page() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert f"{bounds.BODY_BYTES_MAX // bounds.MIB} MiB" in text
    assert f"{bounds.STOP_STRINGS_MAX} stop strings" in text
