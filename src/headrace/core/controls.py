"""Changing how models are served while they are: checked, put on the record of changes, carried out.

Nothing of it is stored: a restart goes back to the settings.
"""

from typing import Any, TypeVar

import msgspec

from headrace.config.scheduling import SchedulingSettings
from headrace.core.core import Core
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.core.messages import ModelChanges, ModelView
from headrace.core.served_model import ServedModel
from headrace.request.controls import AS_CONFIGURED, Controls

T = TypeVar("T", Controls, SchedulingSettings)


class ModelControls:
    """Belongs to the core's loop."""

    def __init__(self, core: Core, directory: Directory) -> None:
        self._core = core
        self._directory = directory

    def views(self) -> list[ModelView]:
        return [_view(model) for model in self._core.models.values()]

    def update(self, model_id: str, changes: ModelChanges, actor: str) -> ModelView:
        """In force with the next step and the next grant. Raises `ControlFailure` 404 and 400."""
        model = self._core.models.get(model_id)
        if model is None:
            raise ControlFailure(404, "model_not_found", f"there is no model {model_id[:64]!r}")
        of_workers, of_queue = Controls.__struct_fields__, SchedulingSettings.__struct_fields__
        for name in changes:
            if name not in of_workers and name not in of_queue:
                raise ControlFailure(
                    400,
                    "unknown_field",
                    f"unknown control {name[:64]!r}; allowed are {', '.join((*of_workers, *of_queue))}",
                    name[:64],
                )
        controls = _merged(model.controls, AS_CONFIGURED, changes)
        scheduling = _merged(model.scheduling, model.configured_scheduling, changes)
        if scheduling.preemption and not model.can_preempt:
            raise ControlFailure(
                400,
                "invalid_value",
                f"preemption: {model_id} cannot stop a running request for another: it has an upstream or static batches",
                "preemption",
            )
        record = {"controls": msgspec.to_builtins(controls), "scheduling": msgspec.to_builtins(scheduling)}
        self._directory.note("model.updated", model_id, record, actor=actor)
        if controls != model.controls:
            self._core.control(model, controls)
        if scheduling != model.scheduling:
            self._core.reschedule(model, scheduling)
        return _view(model)


def _merged(now: T, configured: T, changes: ModelChanges) -> T:
    """What is in force, with those of the changes that belong there; None goes back to what is configured."""
    merged: dict[str, Any] = msgspec.structs.asdict(now)
    for name in merged:
        if name in changes:
            merged[name] = getattr(configured, name) if changes[name] is None else changes[name]
    try:
        return msgspec.convert(merged, type(now), strict=True)
    except msgspec.ValidationError as error:
        raise ControlFailure(400, "invalid_value", str(error)) from None


def _view(model: ServedModel) -> ModelView:
    return ModelView(
        id=model.model_id,
        replicas=len(model.replicas),
        running=model.queue.num_running,
        waiting=model.queue.num_waiting,
        controls=model.controls,
        scheduling=model.scheduling,
    )
