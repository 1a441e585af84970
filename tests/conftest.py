"""What holds for all tests."""

import os

# Every engine loop, in child processes too, compares its books of KV cells with the engine's after each step.
os.environ["HEADRACE_DEBUG_CELLS"] = "1"
