"""One admin process for all tests of a module; tests use tenants of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.admin_world import AdminWorld


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    folder: Path = tmp_path_factory.mktemp("world")
    with AdminWorld(folder) as world:
        yield world
