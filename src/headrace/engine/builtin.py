"""The model that comes with the installation."""

import sys
from pathlib import Path

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def builtin_model_path() -> Path:
    """Where `make install` put it: inside the environment that headrace runs from."""
    return Path(sys.prefix) / "share" / "headrace" / "models" / FILE_NAME
