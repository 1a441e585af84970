"""The judge of `make kills` sees what is wrong: a real ledger and a real worker's file, then forged ones."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kills_evidence import Attempt, Kill, Ledger, attempts_in, copy_progress, violations
from benchmarks.kills_load import Chat

from tests.platform_harness import platform, until


@dataclasses.dataclass
class Evidence:
    ledger: Ledger
    attempts: dict[str, Attempt]
    chats: list[Chat]
    kills: list[Kill]

    def wrong(self) -> list[str]:
        return violations(self.ledger, self.attempts, self.chats, self.kills)

    @property
    def row(self) -> dict[str, Any]:
        return next(iter(self.ledger.rows.values()))

    @property
    def chat(self) -> Chat:
        return next(chat for chat in self.chats if chat.request_id == self.row["request_id"])

    @property
    def attempt_id(self) -> str:
        return str(json.loads(self.row["attempt_ids"])[0])


@pytest.fixture
def evidence(truth: Evidence) -> Evidence:
    """To be forged."""
    return copy.deepcopy(truth)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Two chats, one streamed, whose records the worker has seen acknowledged."""
    chats = []
    tmp_path: Path = tmp_path_factory.mktemp("evidence")
    with platform(tmp_path / "data") as served:
        for is_stream in (False, True):
            reply = served.chat(max_tokens=6, stream=is_stream)
            chat = Chat("Hello", 6, is_stream, is_usage_wanted=False)
            chat.status, chat.request_id = reply.status, reply.headers["x-request-id"]
            if is_stream:
                for line in reply.body.splitlines(keepends=True):
                    chat.take_event(line)
            else:
                chat.take_body(reply.json)
            chats.append(chat)
        until(lambda: not served.num_open())
        copy_progress(list((served.data / "progress").iterdir()), tmp_path / "copies" / "0")
    return Evidence(Ledger(tmp_path / "data"), attempts_in(tmp_path / "copies"), chats, [])


def test_what_is_right_is_right(evidence: Evidence) -> None:
    assert len(evidence.ledger.rows) == len(evidence.attempts) == 2, "acknowledged records are seen, too"
    assert all(chat.is_answered for chat in evidence.chats)
    assert evidence.chats[1].chunks == 6
    assert evidence.wrong() == []


def _lose_row(evidence: Evidence) -> None:
    del evidence.ledger.rows[evidence.row["request_id"]]


def _settle_twice(evidence: Evidence) -> None:
    evidence.ledger.settled[evidence.row["request_id"]] += 1


def _hold(evidence: Evidence) -> None:
    evidence.ledger.held.append("req_1")


def _count_less(evidence: Evidence) -> None:
    evidence.row["completion_tokens"] -= 1


def _lose_attempt(evidence: Evidence) -> None:
    del evidence.attempts[evidence.attempt_id]


def _work_unseen(evidence: Evidence) -> None:
    evidence.attempts["req_2.1"] = dataclasses.replace(
        evidence.attempts[evidence.attempt_id], attempt_id="req_2.1"
    )


def _answered_and_recovered(evidence: Evidence) -> None:
    evidence.row["outcome"] = "recovered"


def _more_seen_than_counted(evidence: Evidence) -> None:
    evidence.chat.chunks = evidence.row["completion_tokens"] + 1


def _told_otherwise(evidence: Evidence) -> None:
    evidence.chat.is_answered, evidence.chat.error_code = False, "worker_lost"


def _uncaused(evidence: Evidence) -> None:
    evidence.row["outcome"] = "worker_error"


@pytest.mark.parametrize(
    "forge",
    [_lose_row, _settle_twice, _hold, _count_less, _lose_attempt, _work_unseen, _answered_and_recovered,
     _more_seen_than_counted, _told_otherwise, _uncaused],
)  # fmt: skip
def test_what_is_wrong_is_found(evidence: Evidence, forge: Callable[[Evidence], None]) -> None:
    forge(evidence)
    assert evidence.wrong()
