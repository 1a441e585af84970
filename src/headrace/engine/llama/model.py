"""Loading a GGUF file: every reason why it cannot work is found out and said before it is tried."""

import os
from pathlib import Path
from typing import Any

from headrace.engine.llama import definitions, memory
from headrace.engine.llama.gguf import GgufFile
from headrace.engine.llama.library import Library
from headrace.engine.llama.memory import Demand, Shape
from headrace.engine.llama.settings import LlamaSettings
from headrace.engine.llama.vocabulary import LlamaVocabulary
from headrace.errors import ConfigError, ModelError

_TEXT_BYTES = 512


class LlamaModel:
    """Weights and vocabulary of one model file; `handle` is the library's model."""

    def __init__(self, library: Library, settings: LlamaSettings) -> None:
        self._library = library
        path = settings.model_path
        self.shape = _inspect(library, settings)
        self.handle: Any = _load(library, path)
        try:
            _check_kind(library, path, self.handle)
            _check_context(path, self.handle, library, settings.context_tokens)
            self.vocabulary = LlamaVocabulary(library, self.handle)
        except BaseException:
            library.api.llama_model_free(self.handle)
            raise
        api = library.api
        self.name = self._text("general.name") or path.stem
        self.architecture = self._text("general.architecture")
        self.file_type: int = api.llama_model_ftype(self.handle)
        self.quantization = library.text(api.llama_ftype_name(self.file_type)) or "unknown"
        self.parameters: int = api.llama_model_n_params(self.handle)
        self.weights_bytes: int = api.llama_model_size(self.handle)

    def free(self) -> None:
        """Give the weights back; the model and its vocabulary must not be used any more."""
        self._library.api.llama_model_free(self.handle)
        self.handle = self._library.ffi.NULL

    def _text(self, key: str) -> str:
        buffer = self._library.ffi.new("char[]", _TEXT_BYTES)
        length = self._library.api.llama_model_meta_val_str(self.handle, key.encode(), buffer, _TEXT_BYTES)
        return (self._library.text(buffer) or "") if length > 0 else ""


def estimate(shape: Shape, settings: LlamaSettings) -> Demand:
    """The memory a model of this shape needs with these settings."""
    return memory.estimate_demand(
        shape,
        sequences=settings.sequences,
        context_tokens=settings.context_tokens,
        batch_tokens=settings.batch_capacity,
        is_flash_attention=settings.flash_attention,
        pool_tokens=settings.pool_tokens,
    )


def _inspect(library: Library, settings: LlamaSettings) -> Shape:
    """The model's shape, after all checks that need no weights in memory."""
    with GgufFile(library, settings.model_path) as file:
        parts = file.number("split.count") or 1
        if parts > 1:
            raise ModelError(
                f"The model file {file.path} is one of {parts} parts; merge them into one file first."
            )
        file.check_complete()
        shape = memory.read_shape(file)
    memory.check_fits(settings.model_path, estimate(shape, settings), memory.available_bytes())
    return shape


def _load(library: Library, path: Path) -> Any:
    parameters = library.api.llama_model_default_params()
    parameters.n_gpu_layers = 0
    # Mapped, so that several workers on one machine share the pages of one file.
    parameters.load_mode = definitions.LOAD_MODE_MMAP
    parameters.check_tensors = True
    library.log.clear()
    handle = library.api.llama_model_load_from_file(os.fsencode(path), parameters)
    if handle == library.ffi.NULL:
        raise ModelError(
            f"The model file {path} cannot be loaded (corrupt, or of an architecture this llama.cpp build "
            f"does not know): {library.log.text()}"
        )
    return handle


def _check_kind(library: Library, path: Path, handle: Any) -> None:
    """Only plain decoders can be served: a slot's tokens can be dropped and recomputed at will."""
    api = library.api
    problem = None
    if api.llama_model_has_encoder(handle) or not api.llama_model_has_decoder(handle):
        problem = "has an encoder; headrace serves decoder-only models"
    elif api.llama_model_is_recurrent(handle) or api.llama_model_is_hybrid(handle):
        problem = "is recurrent or hybrid; headrace has not been verified with these"
    elif api.llama_model_is_diffusion(handle):
        problem = "is a diffusion model; headrace serves autoregressive models"
    elif api.llama_vocab_type(api.llama_model_get_vocab(handle)) == definitions.VOCABULARY_NONE:
        problem = "has no vocabulary"
    if problem:
        raise ModelError(f"The model in {path} {problem}.")


def _check_context(path: Path, handle: Any, library: Library, context_tokens: int) -> None:
    trained: int = library.api.llama_model_n_ctx_train(handle)
    if context_tokens > trained:
        raise ConfigError(
            f"context_tokens is {context_tokens}, but the model in {path} was trained for at most {trained}."
        )
