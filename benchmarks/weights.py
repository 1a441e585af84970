"""The built-in model in the form that workers load."""

from pathlib import Path

from headrace.engine.builtin import builtin_model_path
from headrace.engine.llama import prepare_model


def converted_builtin(cache: Path) -> Path:
    """Path of the converted weights, made in `cache` if they are not there."""
    return Path(prepare_model(builtin_model_path(), cache).path)
