"""Lists of the admin API come in pages; commands show them whole."""

from typing import Any

from headrace.cli.connection import Connection


def every_page(server: Connection, path: str, continue_by: str, **query: Any) -> list[dict[str, Any]]:
    """All items of a list. `continue_by` names the field whose last value is the next `after`."""
    found: list[dict[str, Any]] = []
    after = None
    while True:
        page = server.admin("GET", path, query={**query, "after": after})
        found += page["data"]
        if not page["has_more"]:
            return found
        after = found[-1][continue_by]
