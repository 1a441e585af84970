"""The embedded engine: headrace's own scheduling over llama.cpp's C API.

`prepare_model` makes a file that batches well, `LlamaEngine.load` loads it. A process that does so is
best started with `headrace.engine.loading.PROCESS_ENVIRONMENT`.
"""

from headrace.engine.llama.convert import PreparedModel, prepare_model
from headrace.engine.llama.engine import LlamaEngine
from headrace.engine.llama.settings import LlamaSettings

__all__ = ["LlamaEngine", "LlamaSettings", "PreparedModel", "prepare_model"]
