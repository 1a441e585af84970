"""The embedded engine: headrace's own scheduling over llama.cpp's C API.

`prepare_model` makes a file that batches well, `LlamaEngine.load` loads it. Set OMP_WAIT_POLICY to
`passive` before the process starts when it shares its cores (the library's threads spin otherwise).
"""

from headrace.engine.llama.convert import PreparedModel, prepare_model
from headrace.engine.llama.engine import LlamaEngine
from headrace.engine.llama.settings import LlamaSettings

__all__ = ["LlamaEngine", "LlamaSettings", "PreparedModel", "prepare_model"]
