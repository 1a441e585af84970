"""The model that comes with the installation."""

import sys
from pathlib import Path

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def builtin_model_path() -> Path:
    """Where `make install` put it: inside the environment that headrace runs from."""
    return Path(sys.prefix) / "share" / "headrace" / "models" / FILE_NAME
