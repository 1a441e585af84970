"""One real server with the stub engine for all tests of the gateway."""

from collections.abc import Iterator

import pytest

from tests.platform_harness import Platform, platform


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Eight slots of a fast stub."""
    with platform(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One slow slot and a queue of two, so that requests wait and are refused."""
    stub = {"decode_us_per_step": 20_000, "output_tokens": 200, "prefill_us_per_token": 2_000}
    model = {"id": "narrow", "engine": {"max_batch_size": 1, "max_context_tokens": 512, "stub": stub}}
    with platform(
        tmp_path_factory.mktemp("narrow"),
        models=[model],
        queue={"length": 2, "timeout_s": 3},
        headers_after_ms=300,
        keep_alive_ms=100,
    ) as running:
        yield running
