"""What the library says is kept, bounded, and never gets in the way."""

from typing import Any

import pytest
from cffi import FFI

from headrace.engine.llama import definitions
from headrace.engine.llama.log import LibraryLog


class FakeLibrary:
    """Takes the callback like the library does."""

    def __init__(self, ffi: FFI) -> None:
        self.ffi = ffi
        self.callback: Any = None

    def llama_log_set(self, callback: Any, _user_data: Any) -> None:
        self.callback = callback

    def say(self, level: int, text: bytes) -> None:
        self.callback(level, self.ffi.new("char[]", text), self.ffi.NULL)


@pytest.fixture
def ffi() -> FFI:
    return FFI()


def test_only_warnings_and_errors_are_kept_with_their_continuations(ffi: FFI) -> None:
    fake = FakeLibrary(ffi)
    log = LibraryLog(ffi, fake)
    fake.say(2, b"chatter\n")
    fake.say(definitions.LOG_CONTINUED, b"more chatter\n")
    fake.say(definitions.LOG_ERROR, b"broken ")
    fake.say(definitions.LOG_CONTINUED, b"tensor\n")
    assert log.text() == "broken; tensor"
    log.clear()
    assert log.text() == ""


def test_the_log_is_bounded_in_lines_and_in_their_length(ffi: FFI) -> None:
    fake = FakeLibrary(ffi)
    log = LibraryLog(ffi, fake)
    for number in range(1000):
        fake.say(definitions.LOG_WARN, b"%d " % number + b"x" * 10_000)
    assert len(log.text()) < 20_000
    assert "999" in log.text()
    assert not log.text().startswith("0 ")


def test_broken_text_does_not_raise(ffi: FFI, capfd: pytest.CaptureFixture[str]) -> None:
    fake = FakeLibrary(ffi)
    log = LibraryLog(ffi, fake)
    fake.say(definitions.LOG_ERROR, b"\xff\xfe broken")
    fake.callback(definitions.LOG_ERROR, ffi.NULL, ffi.NULL)
    assert "broken" in log.text()
    assert capfd.readouterr().err == ""
