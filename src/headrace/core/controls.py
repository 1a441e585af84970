"""Changing how models are served while they are: checked, put on the record of changes, carried out.

Nothing of it is stored: a restart goes back to the settings.
"""

import msgspec

from headrace.core.core import Core
from headrace.core.directory import Directory
from headrace.core.failure import ControlFailure
from headrace.core.messages import ModelView
from headrace.core.served_model import ServedModel
from headrace.request.controls import Controls


class ModelControls:
    """Belongs to the core's loop."""

    def __init__(self, core: Core, directory: Directory) -> None:
        self._core = core
        self._directory = directory

    def views(self) -> list[ModelView]:
        return [_view(model) for model in self._core.models.values()]

    def update(self, model_id: str, changes: dict[str, int | float | None], actor: str) -> ModelView:
        """In force with the next step. Raises `ControlFailure` 404 and 400."""
        model = self._core.models.get(model_id)
        if model is None:
            raise ControlFailure(404, "model_not_found", f"there is no model {model_id[:64]!r}")
        known = Controls.__struct_fields__
        for name in changes:
            if name not in known:
                raise ControlFailure(
                    400,
                    "unknown_field",
                    f"unknown control {name[:64]!r}; allowed are {', '.join(known)}",
                    name[:64],
                )
        merged = {**msgspec.structs.asdict(model.controls), **changes}
        try:
            controls = msgspec.convert(merged, Controls, strict=True)
        except msgspec.ValidationError as error:
            raise ControlFailure(400, "invalid_value", str(error)) from None
        self._directory.note(
            "model.updated", model_id, {"controls": msgspec.to_builtins(controls)}, actor=actor
        )
        self._core.control(model, controls)
        return _view(model)


def _view(model: ServedModel) -> ModelView:
    return ModelView(
        id=model.model_id,
        replicas=len(model.replicas),
        running=model.queue.num_running,
        waiting=model.queue.num_waiting,
        controls=model.controls,
    )
