"""Which library the engine's tests run on: `make test-native` runs them on the one compiled here."""

import os
from typing import Final

from headrace.config.settings import EngineLibrary

LIBRARY: Final[EngineLibrary] = "native" if os.environ.get("HEADRACE_TEST_LIBRARY") == "native" else "wheel"
