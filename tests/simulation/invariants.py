"""What has to be true: for each answer, when all is quiet, and when the server has stopped."""

from typing import Any

from headrace.admission.invariants import check
from headrace.config.limits import UNLIMITED
from headrace.ledger.records import OperationRecord
from headrace.store.ledger_file import find_record, find_records
from headrace.store.verify import verify_ledger
from tests.simulation.clients import Client, Reply
from tests.simulation.server import SimulatedServer
from tests.simulation.truth import MINUTE_US, Attempt, accounts_of

GRAIN_US = 1_000
"""The limiter keeps settlements of one millisecond together."""
LEASE_GRACE_SECONDS = 32.0
"""For so long after its end a lease may go unnoticed: what a stalled connection held up renews it late."""
OUTCOMES = {
    "worker_lost": "worker_lost",
    "engine_error": "worker_error",
    "deadline_exceeded": "timeout",
    "shutting_down": "shutdown",
}
"""How an operation ends whose client got this error; all others are refusals."""
OWN_FAULTS = frozenset(
    (
        "rate_limit_exceeded",
        "context_length_exceeded",
        "model_not_found",
        "invalid_api_key",
        "invalid_body",
        "deadline_exceeded",
    )
)
"""What a client can be told when all goes well."""
LATER_US = (0, 10_000_000, 20_000_000, 30_000_000, 40_000_000, 50_000_000, 60_000_000)


# --- what looks into the core: the only place that has to follow its insides ----------------------


def is_busy(server: SimulatedServer) -> bool:
    """Whether operations are open or still being closed."""
    core = server.core
    return bool(core._open or core._tasks or core.journal.num_pending)


def leftovers(server: SimulatedServer) -> list[str]:
    """What is still taken although nothing runs."""
    core = server.core
    found = [f"{request_id} is open" for request_id in core._open]
    found += [
        f"{model.model_id}: {model.queue.num_running} run, {model.queue.num_waiting} wait"
        for model in core.models.values()
        if model.queue.num_running or model.queue.num_waiting
    ]
    for account in core.controller.accounts.all():
        name = f"{account.level} {account.account_id}"
        if account.window.held:
            found.append(f"{name} holds {account.window.held} tokens")
        if account.memory:
            found.append(f"{name} holds {account.memory} bytes of memory")
        if account.running or account.streams:
            found.append(f"{name}: {account.running} running, {account.streams} streams")
    found += [f"{one.request_id} is open in the journal" for one in core.journal.open_reservations()]
    return found


def check_state(server: SimulatedServer, now_us: int) -> str | None:
    """What is wrong with the core's state machine right now; None if all is well."""
    try:
        check(server.core.controller, now_us)
    except AssertionError as error:
        return f"between two calls: {error}"
    return None


def forgotten(server: SimulatedServer, now_us: int) -> list[str]:
    """Granted requests of which their worker has known nothing for longer than a lease may last."""
    core = server.core
    known = {
        attempt_id
        for worker in server.workers
        if worker.returncode is None and worker._server is not None
        for attempt_id in worker._server._attempts
    }
    over_us = int((core.settings.lease_s + LEASE_GRACE_SECONDS) * 1e6)
    found = []
    for operation in core.open_operations:
        attempt = getattr(operation.answer, "_attempt", None)
        if attempt is None or attempt.attempt_id in known or attempt.record.done():
            server.forgotten_since_us.pop(operation.request_id, None)
        elif now_us - server.forgotten_since_us.setdefault(operation.request_id, now_us) > over_us:
            found.append(operation.request_id)
    return found


def used_by_limiter(server: SimulatedServer, now_us: int) -> dict[tuple[str, str], int]:
    """Tokens of the last minute as the limiter counts them."""
    accounts = server.core.controller.accounts.all()
    # Inner levels are counted only where something is limited.
    return {
        (one.level, one.account_id): one.window.used(now_us)
        for one in accounts
        if one.level not in ("department", "user", "tenant_model") or one.limits != UNLIMITED
    }


# --- the checks -----------------------------------------------------------------------------------


def check_answer(world: Any, client: Client) -> None:
    """A whole reply has arrived: its operation has ended, durably, as the reply says."""
    reply = client.reply()
    assert reply is not None
    request_id = client.request_id
    if request_id is None:
        world.violated(f"client {client.plan.number} got a reply without a request id")
        return
    with world.ledger() as connection:
        row = None if connection is None else find_record(connection, request_id)
    is_good = reply.status == 200 and reply.error is None
    if not is_good:
        _check_refused(world, client, reply, row)
        return
    if row is None or row.outcome != "completed":
        outcome = None if row is None else row.outcome
        world.violated(f"client {client.plan.number} has its whole answer, and its row is {outcome}")
        return
    if reply.usage is not None and (
        reply.usage["completion_tokens"] != row.completion_tokens
        or reply.usage["prompt_tokens"] != row.prompt_tokens
    ):
        world.violated(f"{request_id}: the client was told {reply.usage}, the ledger has {row}")
    attempt = world.truth.attempt_of_request(request_id)
    if reply.text != attempt.text():
        world.violated(f"{request_id}: whole answer {reply.text!r}, generated {attempt.text()!r}")


def _check_refused(world: Any, client: Client, reply: Reply, row: OperationRecord | None) -> None:
    if reply.error is None:
        world.violated(f"client {client.plan.number} got status {reply.status} without an error")
    elif row is not None and row.outcome == "completed":
        world.violated(
            f"client {client.plan.number} was refused ({reply.error['code']}) and its row is completed"
        )


def check_quiet(world: Any) -> None:
    """Faults are over and nobody waits: nothing may be taken, and the limiter agrees with the ledger."""
    left = leftovers(world.server)
    if left:
        world.violated("all is quiet, and yet: " + "; ".join(left))
        return
    with world.ledger() as connection:
        rows = list(find_records(connection))
    for later_us in LATER_US:  # nothing more will be settled, so the future can be asked for as well
        _check_windows(world, rows, later_us)


def _check_windows(world: Any, rows: list[OperationRecord], later_us: int) -> None:
    now_us, wall_us = world.clock.monotonic_us() + later_us, world.clock.wall_us() + later_us
    for name, used in used_by_limiter(world.server, now_us).items():
        ages = [(wall_us - row.end_ts, row) for row in rows if name in accounts_of(row)]
        at_least = sum(tokens_of(row) for age_us, row in ages if age_us < MINUTE_US - GRAIN_US)
        at_most = sum(tokens_of(row) for age_us, row in ages if age_us < MINUTE_US + GRAIN_US)
        if not at_least <= used <= at_most:
            world.violated(
                f"{name}: the limiter counts {used} tokens in the last minute, the ledger {at_most}"
            )


def check_end(world: Any) -> None:
    """The server has stopped: the ledger is whole and says what happened."""
    verdict = verify_ledger(world.path / "ledger.db")
    if verdict.differences:
        world.violated("the ledger differs from its journal: " + "; ".join(verdict.differences))
    if verdict.held:
        world.violated(f"{verdict.held} operations are held at the end")
    with world.ledger() as connection:
        rows = {row.request_id: row for row in find_records(connection)}
        reserved = {
            one for (one,) in connection.execute("SELECT request_id FROM journal WHERE kind = 'reserve'")
        }
    truth = world.truth
    for request_id, operation in truth.operations.items():
        row = rows.get(request_id)
        is_excused = operation.life in truth.crashed_lives and request_id not in reserved
        if row is None:
            if not is_excused:
                world.violated(f"{request_id} was accepted and has no final row")
            continue
        _check_times(world, row)
        _check_counts(world, row, truth.attempt_of_request(request_id))
    for request_id in truth.attempts:
        if request_id.rpartition(".")[0] not in rows:
            world.violated(f"{request_id} ran on a worker and has no row")
    for request_id, code in truth.refused.items():
        row = rows.get(request_id)
        if row is not None and (tokens_of(row) or row.attempt_ids):
            world.violated(f"{request_id} was refused ({code}) and is charged")
    for client in world.clients:
        _check_text(world, client, rows)
        if world.is_quiet:
            _check_served(world, client)


def _check_counts(world: Any, row: OperationRecord, attempt: Attempt | None) -> None:
    counts = {(0, 0)} if attempt is None else attempt.counts
    if (row.prompt_tokens, row.completion_tokens) not in counts:
        world.violated(
            f"{row.request_id} ({row.outcome}, {row.count_source}): the row has {row.prompt_tokens} + "
            f"{row.completion_tokens} tokens, the engine computed and generated {counts}"
        )


def _check_times(world: Any, row: OperationRecord) -> None:
    """Only where the worker lived: what one killed in a step has noted is ahead of its death."""
    times = [row.queue_enter_ts, row.start_ts, row.first_token_ts, row.end_ts]
    known = [one for one in times if one is not None]
    if row.outcome == "completed" and known != sorted(known):
        world.violated(f"{row.request_id}: its times are out of order: {times}")


def _check_served(world: Any, client: Client) -> None:
    """Nothing went wrong in this world, so nobody may hear that something did."""
    if client.left_s is not None:
        return
    reply = client.reply()
    if reply is None or not client.is_complete:
        world.violated(f"client {client.plan.number} got no whole reply although nothing went wrong")
    elif reply.error is not None and reply.error["code"] not in OWN_FAULTS:
        world.violated(f"client {client.plan.number} got {reply.error} although nothing went wrong")


def _check_text(world: Any, client: Client, rows: dict[str, OperationRecord]) -> None:
    """What a client has seen is what its engine said, without a gap, and all of it is charged."""
    reply = client.reply()
    if reply is None or not reply.text or client.request_id not in rows:
        return
    attempt = world.truth.attempt_of_request(client.request_id)
    text = attempt.text(rows[client.request_id].completion_tokens) if attempt else ""
    if not text.startswith(reply.text):
        world.violated(
            f"client {client.plan.number} has seen {reply.text!r}, generated and charged is {text!r}"
        )


def tokens_of(row: OperationRecord) -> int:
    """What limits count."""
    return row.charged_prompt_tokens + row.charged_completion_tokens
