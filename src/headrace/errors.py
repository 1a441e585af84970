"""Every error headrace raises on purpose, as one tree.

    HeadraceError
    ├── SetupError              the machine, a file or a setting is not fit: said at start-up, exit 2
    │   ├── PlatformError       this operating system, processor or library build is not supported
    │   ├── ModelError          a model file is missing, corrupt or of an unsupported kind
    │   ├── MemoryShortage      the model with these settings does not fit this machine
    │   └── ConfigError         a setting is unknown or out of range
    ├── EngineFault             the engine failed while computing; its sequences are lost
    ├── ProtocolError           a peer (worker, admin process) broke the message protocol
    └── Refusal                 a client's request cannot be served; carries the whole reply
                                (`headrace.api.refusals` holds the catalogue)

Errors of libraries are translated into these at one border each (engine, store, HTTP).
"""

from typing import Any


class HeadraceError(Exception):
    """Base of all deliberate errors. The text is meant for a person."""


class SetupError(HeadraceError):
    """Something outside the code must change before headrace can start."""


class PlatformError(SetupError):
    """This operating system, processor or library build is not supported."""


class ModelError(SetupError):
    """A model file is missing, corrupt, or of a kind the engine cannot run."""


class MemoryShortage(SetupError):
    """The model with these settings does not fit into this machine's memory."""


class ConfigError(SetupError):
    """A setting is unknown, has the wrong type or is out of range."""


class EngineFault(HeadraceError):
    """The engine reported a failure while computing. All its open sequences are lost."""


class ProtocolError(HeadraceError):
    """A peer process sent something the message protocol does not allow."""


class Refusal(HeadraceError):
    """A client's request cannot be served. Built by the functions of `headrace.api.refusals`."""

    def __init__(
        self,
        *,
        status: int,
        code: str,
        kind: str,
        message: str,
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.message = message
        self.param = param
        self.headers = headers
        self.details = details or {}
