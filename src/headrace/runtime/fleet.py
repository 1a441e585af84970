"""All replicas of a server: supervised workers for embedded models, clients for upstreams."""

import asyncio
import os
from pathlib import Path

from headrace.clock import Clock
from headrace.config.settings import ModelSettings, Settings
from headrace.core.core import Core
from headrace.core.messages import WorkerView
from headrace.core.upstream import UpstreamReplica
from headrace.errors import SetupError
from headrace.http import HttpClient
from headrace.runtime.child import Child
from headrace.runtime.data_directory import DataDirectory
from headrace.runtime.workers import StartChild, Worker, default_model, model_path

WORKER_STOP_SECONDS = 5.0
"""After the drain nothing runs any more; a worker that still does not end is killed."""

UPSTREAM_GRACE_SECONDS = 1.0


class Fleet:
    """Starts and stops what computes."""

    def __init__(
        self,
        settings: Settings,
        core: Core,
        clock: Clock,
        data: DataDirectory,
        builtin_model: Path,
        *,
        start_child: StartChild = Child.start,
    ) -> None:
        self._start_child = start_child
        self._settings = settings
        self._core = core
        self._clock = clock
        self._data = data
        self._builtin_model = builtin_model
        self._workers: list[Worker] = []
        self._upstreams: list[tuple[ModelSettings, UpstreamReplica]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._models = settings.models or [default_model()]
        for model in self._models:
            core.add_model(model)

    async def start(self) -> None:
        for model in self._models:
            if model.upstream is not None:
                self._start_upstream(model)
                continue
            for worker_id in model.worker_ids:
                worker = Worker(
                    worker_id=worker_id,
                    model=model,
                    model_path=model_path(model, self._builtin_model),
                    settings=self._settings,
                    core=self._core,
                    clock=self._clock,
                    sockets=self._data.sockets,
                    data=self._data.path,
                    start_child=self._start_child,
                )
                self._workers.append(worker)
                self._tasks.append(asyncio.ensure_future(worker.run()))

    async def started(self) -> None:
        """Wait until every worker is ready. Raises `SetupError` for one that never can be."""
        await asyncio.gather(*(worker.started for worker in self._workers))

    async def stop(self) -> None:
        await asyncio.gather(*(worker.drain(WORKER_STOP_SECONDS) for worker in self._workers))
        await asyncio.gather(*self._tasks)
        for _, upstream in self._upstreams:
            upstream.client.close()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def views(self) -> list[WorkerView]:
        return [worker.view() for worker in self._workers] + [
            WorkerView(
                id=upstream.worker_id,
                model=model.id,
                kind="upstream",
                status="ready" if upstream.last_error is None else "down",
                last_error=upstream.last_error,
                address=upstream.client.name,
                slots=model.max_concurrent_requests,
                running=self._core.running_on(model.id, upstream.replica_id),
                restarts=0,
            )
            for model, upstream in self._upstreams
        ]

    def _start_upstream(self, model: ModelSettings) -> None:
        assert model.upstream is not None
        client = HttpClient(
            model.upstream,
            connections_max=model.max_concurrent_requests,
            # A little more than the request's own deadline, so that this is what a client is told.
            head_timeout_s=self._settings.request_timeout_s + UPSTREAM_GRACE_SECONDS,
            idle_timeout_s=self._settings.request_timeout_s + UPSTREAM_GRACE_SECONDS,
            clock=self._clock,
        )
        upstream = UpstreamReplica(
            replica_id=f"{model.id}-upstream",
            client=client,
            upstream_model=model.upstream_model,
            key=_upstream_key(model),
            clock=self._clock,
        )
        self._upstreams.append((model, upstream))
        self._core.add_replica(model.id, upstream, capacity=model.max_concurrent_requests)


def _upstream_key(model: ModelSettings) -> str | None:
    name = model.upstream_key_env
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise SetupError(
            f"model {model.id}: the environment variable {name} with the upstream's key is not set"
        )
    if not key.isascii() or not key.isprintable():
        raise SetupError(
            f"model {model.id}: the upstream's key in {name} has characters that a header cannot carry"
        )
    return key
