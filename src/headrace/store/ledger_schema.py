"""The tables of ledger.db, version by version, and how to read what earlier versions wrote.

- `journal`: append-only, the whole truth. Triggers forbid changing or deleting rows.
- `held`: the reservations that have not ended.
- `operations`: the final rows, one column for each field of `OperationRecord`, and which rows of the journal
  they come from. Reports read only these. Every index costs each operation more than a microsecond,
  so there is none by model: few models have so many operations that the index by time does as well.
"""

import sqlite3
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import SetupError
from headrace.ledger.records import OperationRecord

_VERSION_1: Final = """
    CREATE TABLE journal (
        seq INTEGER PRIMARY KEY,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('reserve', 'settle')),
        request_id TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TRIGGER journal_no_update BEFORE UPDATE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
    CREATE TRIGGER journal_no_delete BEFORE DELETE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
    CREATE TABLE held (
        request_id TEXT PRIMARY KEY,
        seq INTEGER NOT NULL,
        tenant_id TEXT NOT NULL,
        reserved_tokens INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE operations (
        request_id TEXT NOT NULL PRIMARY KEY,
        attempt_ids TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        user_id TEXT,
        api_key_id TEXT NOT NULL,
        model TEXT NOT NULL,
        version TEXT,
        pool TEXT,
        worker_id TEXT,
        gpu_id TEXT,
        adapter TEXT,
        priority TEXT NOT NULL,
        mode TEXT NOT NULL,
        prompt_tokens_estimated INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        prompt_tokens_cached INTEGER NOT NULL,
        prompt_tokens_injected INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        reserved_tokens INTEGER NOT NULL,
        gpu_memory_mb REAL NOT NULL,
        memory_source TEXT NOT NULL,
        kv_byte_seconds INTEGER NOT NULL,
        prefill_us INTEGER NOT NULL,
        decode_us INTEGER NOT NULL,
        queue_enter_ts INTEGER NOT NULL,
        start_ts INTEGER,
        first_token_ts INTEGER,
        end_ts INTEGER NOT NULL,
        latency_us INTEGER NOT NULL,
        status INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        finish_reason TEXT,
        count_source TEXT NOT NULL,
        policy_actions TEXT NOT NULL,
        price_version TEXT,
        cost TEXT,
        trace_id TEXT NOT NULL,
        reserve_seq INTEGER NOT NULL,
        settle_seq INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX operations_by_time ON operations (end_ts);
    CREATE INDEX operations_by_tenant ON operations (tenant_id, end_ts);
    CREATE INDEX operations_by_key ON operations (api_key_id, end_ts);
    CREATE TABLE checkpoint_mark (id INTEGER PRIMARY KEY CHECK (id = 1), number INTEGER NOT NULL) STRICT;
    INSERT INTO checkpoint_mark VALUES (1, 0);
"""

_VERSION_2: Final = """
    DROP TRIGGER journal_no_update;
    DROP TRIGGER journal_no_delete;
    CREATE TABLE journal_2 (
        seq INTEGER PRIMARY KEY,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL CHECK (
            kind IN ('reserve', 'settle', 'void', 'expire', 'late_settle', 'refund', 'refuse')
        ),
        request_id TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    INSERT INTO journal_2 SELECT seq, at_us, kind, request_id, body FROM journal;
    DROP TABLE journal;
    ALTER TABLE journal_2 RENAME TO journal;
    CREATE TRIGGER journal_no_update BEFORE UPDATE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
    CREATE TRIGGER journal_no_delete BEFORE DELETE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
    CREATE TABLE operations_2 (
        request_id TEXT NOT NULL PRIMARY KEY,
        num_requests INTEGER NOT NULL,
        attempt_ids TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        user_id TEXT,
        department TEXT,
        api_key_id TEXT NOT NULL,
        model TEXT NOT NULL,
        version TEXT,
        pool TEXT,
        worker_id TEXT,
        gpu_id TEXT,
        adapter TEXT,
        priority TEXT NOT NULL,
        mode TEXT NOT NULL,
        prompt_tokens_estimated INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        prompt_tokens_cached INTEGER NOT NULL,
        prompt_tokens_injected INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        delivered_tokens INTEGER NOT NULL,
        abort_policy TEXT NOT NULL,
        charged_prompt_tokens INTEGER NOT NULL,
        charged_completion_tokens INTEGER NOT NULL,
        refunded INTEGER NOT NULL,
        reserved_tokens INTEGER NOT NULL,
        gpu_memory_mb REAL NOT NULL,
        memory_source TEXT NOT NULL,
        kv_byte_seconds INTEGER NOT NULL,
        prefill_us INTEGER NOT NULL,
        decode_us INTEGER NOT NULL,
        queue_enter_ts INTEGER NOT NULL,
        start_ts INTEGER,
        first_token_ts INTEGER,
        end_ts INTEGER NOT NULL,
        latency_us INTEGER NOT NULL,
        status INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        code TEXT,
        finish_reason TEXT,
        count_source TEXT NOT NULL,
        policy_actions TEXT NOT NULL,
        price_version TEXT,
        cost TEXT,
        trace_id TEXT NOT NULL,
        reserve_seq INTEGER,
        settle_seq INTEGER NOT NULL,
        late_seq INTEGER,
        refund_seq INTEGER
    ) STRICT;
    INSERT INTO operations_2 (
        request_id, attempt_ids, tenant_id, user_id, api_key_id, model, version, pool, worker_id,
        gpu_id, adapter, priority, mode, prompt_tokens_estimated, prompt_tokens,
        prompt_tokens_cached, prompt_tokens_injected, completion_tokens, reserved_tokens,
        gpu_memory_mb, memory_source, kv_byte_seconds, prefill_us, decode_us, queue_enter_ts,
        start_ts, first_token_ts, end_ts, latency_us, status, outcome, finish_reason, count_source,
        policy_actions, price_version, cost, trace_id, reserve_seq, settle_seq,
        num_requests, delivered_tokens, abort_policy, charged_prompt_tokens, charged_completion_tokens, refunded
    ) SELECT
        request_id, attempt_ids, tenant_id, user_id, api_key_id, model, version, pool, worker_id,
        gpu_id, adapter, priority, mode, prompt_tokens_estimated, prompt_tokens,
        prompt_tokens_cached, prompt_tokens_injected, completion_tokens, reserved_tokens,
        gpu_memory_mb, memory_source, kv_byte_seconds, prefill_us, decode_us, queue_enter_ts,
        start_ts, first_token_ts, end_ts, latency_us, status, outcome, finish_reason, count_source,
        policy_actions, price_version, cost, trace_id, reserve_seq, settle_seq,
        1, iif(outcome = 'completed', completion_tokens, 0), 'generated', prompt_tokens, completion_tokens, 0
    FROM operations;
    DROP TABLE operations;
    ALTER TABLE operations_2 RENAME TO operations;
    CREATE INDEX operations_by_time ON operations (end_ts);
    CREATE INDEX operations_by_tenant ON operations (tenant_id, end_ts);
    CREATE INDEX operations_by_key ON operations (api_key_id, end_ts);
"""
"""Kinds and charges. Up to here all operations were charged what the engine had counted."""

SCHEMA: Final = (_VERSION_1, _VERSION_2)


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """For readers, which do not bring a file up to date. Raises `SetupError`, `sqlite3.Error`."""
    (version,) = connection.execute("SELECT max(version) FROM schema_version").fetchone()
    if version != len(SCHEMA):
        raise SetupError(
            f"{path} has schema version {version}, this headrace reads version {len(SCHEMA)}; "
            "the first start of a newer server brings an older file up to date"
        )


def decode_record(body: str) -> OperationRecord:
    """The record in a journal row of any version; one of version 1 gets the fields that the migration gave its
    row. Raises `msgspec.DecodeError`.
    """
    record = msgspec.json.decode(body, type=OperationRecord)
    if is_version_1(body):
        record = msgspec.structs.replace(
            record,
            delivered_tokens=record.completion_tokens if record.outcome == "completed" else 0,
            charged_prompt_tokens=record.prompt_tokens,
            charged_completion_tokens=record.completion_tokens,
        )
    return record


def is_version_1(body: str) -> bool:
    """Whether the record was written before there were charges. A quote inside a value would be escaped."""
    return '"abort_policy":' not in body
