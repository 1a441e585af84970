"""The queues as they are told: to a request that begins to wait, to its tenant, to an administrator, to metrics.

A tenant is told of its own requests, and of others how many there are: no names, no sizes, no single request.
"""

from typing import Any, Final

import msgspec

from headrace import bounds
from headrace.admission.controller import AdmissionController
from headrace.admission.entry import Entry
from headrace.api import refusals
from headrace.api.queue_facts import QueueFacts
from headrace.clock import Clock
from headrace.config.scheduling import ServiceClass
from headrace.core import messages as m
from headrace.core.demands import flow_of, weight_of
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.core.operation import Operation
from headrace.core.served_model import ServedModel
from headrace.errors import Refusal
from headrace.scheduling.explain import REASONS, Explanation
from headrace.scheduling.explained_queue import TenantPart, WaitingRequest
from headrace.scheduling.policy import Demand
from headrace.scheduling.queue_bounds import QueueFull
from headrace.telemetry.families import Labels

CLASSES: Final[tuple[ServiceClass, ...]] = ("interactive", "batch")


class QueueViews:
    """Belongs to the core's loop. Changes nothing but what it has counted."""

    def __init__(
        self,
        controller: AdmissionController,
        directory: Directory,
        models: dict[str, ServedModel],
        clock: Clock,
    ) -> None:
        self._controller = controller
        self._directory = directory
        self._models = models
        self._clock = clock

    # --- a request that waits -----------------------------------------------------------------------

    def at_entry(self, entry: Entry) -> Explanation | None:
        """Where a request stands that could not start at once."""
        return self._controller.explain(entry, number_max=bounds.QUEUE_POSITIONS_AT_ENTRY)

    def waiting(self, operation: Operation) -> dict[str, Any] | None:
        """Where a request stands now; None if it does not wait."""
        operation.model.queue.advance(self._clock.monotonic_us())
        found = self._controller.explain(operation.entry, number_max=bounds.QUEUE_POSITIONS_MAX)
        return None if found is None else _shown(found, operation.entry)

    def facts(
        self, model: ServedModel, tenant: str, *, flow: str, weight: float, wait: Explanation | None = None
    ) -> QueueFacts:
        """What a tenant is told that was refused a place in the queue, or has lost the one it had (`wait`). `flow` and
        `weight`: of the request. Takes the same time however many wait."""
        queue = model.queue
        limits = queue.bounds
        tenant_length, tenant_tokens = queue.waiting_of(tenant)
        facts = QueueFacts(
            length=queue.num_waiting,
            length_max=limits.length,
            tokens=queue.waiting_tokens,
            tokens_max=limits.tokens,
            tenants=queue.num_tenants_waiting,
            tenant_length=tenant_length,
            tenant_length_max=limits.tenant_length,
            tenant_tokens=tenant_tokens,
            tenant_tokens_max=limits.tenant_tokens,
            share=round(queue.share_of(flow, weight), 4),
        )
        if wait is None:
            return facts
        return msgspec.structs.replace(
            facts, position=wait.position, is_position_exact=wait.is_exact, reason=wait.reason
        )

    def refusal(self, model: ServedModel, tenant: str, demand: Demand, full: QueueFull) -> Refusal:
        """The reply to a request that found the queue full."""
        facts = self.facts(model, tenant, flow=demand.flow or tenant, weight=demand.weight)
        return refusals.queue_full(
            level=full.level, bound=full.bound, limit=full.limit, used=full.used, queue=facts
        )

    def facts_of(self, operation: Operation) -> QueueFacts:
        """What the client of a request is told that waited in vain."""
        entry = operation.entry
        facts = self.facts(
            operation.model, entry.tenant_id, flow=entry.flow, weight=entry.weight, wait=operation.wait
        )
        waited_us = self._clock.monotonic_us() - operation.accepted_us
        return msgspec.structs.replace(facts, waited_ms=waited_us // 1000)

    # --- lists --------------------------------------------------------------------------------------

    def of_tenant(self, model: ServedModel, tenant: str) -> dict[str, Any]:
        """`GET /v1/queue`: a tenant's own requests, and sums of the model."""
        now_us = self._clock.monotonic_us()
        queue = model.queue
        queue.advance(now_us)
        sharing = self._directory.sharing_of(tenant)
        account = self._controller.accounts.find("tenant", tenant)
        is_throttled = account is not None and account.throttled_until_us > now_us
        flow = flow_of(tenant, sharing, is_throttled=is_throttled)
        weight = weight_of(sharing, is_throttled=is_throttled)
        part = queue.part_of(flow, weight)
        own = self._controller.waiting_of(
            model.model_id, tenant, number_max=bounds.QUEUE_LIST_MAX, looked_at_max=bounds.QUEUE_POSITIONS_MAX
        )
        facts = msgspec.to_builtins(self.facts(model, tenant, flow=flow, weight=weight))
        for name in ("position", "is_position_exact", "reason", "waited_ms", "share"):
            del facts[name]
        return {
            "object": "queue",
            "model": model.model_id,
            "policy": queue.policy.name,
            **facts,
            "running": queue.num_running,
            "places": queue.num_places,
            "tenant": {
                "id": tenant,
                "is_shared": flow != tenant,
                "is_throttled": is_throttled,
                "weight": part.weight,
                "share": round(part.share, 4),
                "lead": round(part.lead, 3),
                "received_60s": round(model.service.received_by(flow, now_us), 3),
            },
            "data": [_listed(one) for one in own],
            "has_more": facts["tenant_length"] > len(own),
        }

    def views(self, model_id: str | None, limit: int) -> list[m.QueueView]:
        """All queues, or that of one model, with their first requests. Raises `ControlFailure` 404 and 400."""
        if not 1 <= limit <= bounds.QUEUE_POSITIONS_MAX:
            raise ControlFailure(
                400, "invalid_limit", f"limit is from 1 to {bounds.QUEUE_POSITIONS_MAX}", "limit"
            )
        if model_id is None:
            return [self._view(model, limit) for model in self._models.values()]
        model = self._models.get(model_id)
        if model is None:
            raise ControlFailure(404, "model_not_found", f"there is no model {model_id[:64]!r}")
        return [self._view(model, limit)]

    # --- metrics ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Once a second: note what was served, and how many wait."""
        now_us = self._clock.monotonic_us()
        for model in self._models.values():
            queue = model.queue
            model.service.look(now_us, running=queue.costs_running(), waiting=queue.weights_waiting())
            model.waiting = {name: queue.num_waiting_of(name) for name in CLASSES}

    def num_waiting(self) -> list[tuple[Labels, float]]:
        """By model and class. Asked from another thread, so it is what was noted last."""
        return [
            ((model.model_id, name), model.waiting.get(name, 0) if model.queue.num_waiting else 0)
            for model in list(self._models.values())
            for name in CLASSES
        ]

    def jain_indexes(self) -> list[tuple[Labels, float]]:
        """By model. May be asked from another thread."""
        now_us = self._clock.monotonic_us()
        return [((model.model_id,), model.service.jain(now_us)) for model in list(self._models.values())]

    def memory_held(self) -> list[tuple[Labels, float]]:
        """Bytes by model. May be asked from another thread."""
        accounts = [self._controller.accounts.find("model", name) for name in list(self._models)]
        return [((one.account_id,), one.memory) for one in accounts if one is not None]

    def num_throttled(self) -> list[tuple[Labels, float]]:
        """Accounts that are slowed down. May be asked from another thread."""
        return [((), self._controller.accounts.num_throttled(self._clock.monotonic_us()))]

    # --- inside -------------------------------------------------------------------------------------

    def _view(self, model: ServedModel, limit: int) -> m.QueueView:
        now_us = self._clock.monotonic_us()
        queue = model.queue
        queue.advance(now_us)
        first = self._controller.first_waiting(model.model_id, number_max=limit)
        parts = queue.parts(bounds.QUEUE_TENANTS_MAX)
        received = model.service.received(now_us)
        return m.QueueView(
            model=model.model_id,
            policy=queue.policy.name,
            length=queue.num_waiting,
            length_max=queue.bounds.length,
            tokens=queue.waiting_tokens,
            tokens_max=queue.bounds.tokens,
            waiting_by_class={name: queue.num_waiting_of(name) for name in CLASSES},
            running=queue.num_running,
            places=queue.num_places,
            tenants_waiting=queue.num_tenants_waiting,
            jain_index=round(model.service.jain(now_us), 4),
            tenants=[_tenant_view(part, received.get(part.flow, 0.0)) for part in parts],
            requests=[
                m.WaitingView(tenant=one.ticket.tenant_id, api_key_id=_key_of(one.ticket), **_listed(one))
                for one in first
            ],
        )


def _key_of(entry: Entry) -> str:
    return next((one.account_id for one in entry.accounts if one.level == "key"), "")


def _tenant_view(part: TenantPart, received: float) -> m.TenantQueueView:
    return m.TenantQueueView(
        tenant=part.flow,
        waiting=part.num_waiting,
        running=part.num_granted,
        weight=part.weight,
        share=round(part.share, 4),
        lead=round(part.lead, 3),
        received_60s=round(received, 3),
    )


def _listed(one: WaitingRequest[Entry]) -> dict[str, Any]:
    return {
        "request_id": one.ticket.request_id,
        **_shown(one.explanation, one.ticket),
        "service_class": one.service_class,
        "priority": one.priority,
        "tokens": one.tokens,
    }


def _shown(explanation: Explanation, entry: Entry) -> dict[str, Any]:
    return {
        "position": explanation.position,
        "is_position_exact": explanation.is_exact,
        "waited_ms": explanation.waited_us // 1000,
        "reason": explanation.reason,
        "reason_text": REASONS[explanation.reason],
        "is_throttled": entry.is_throttled,
        "share": round(explanation.tenant_share, 4),
    }
