"""The core's answer to an administrator who asks for something that cannot be done."""

from headrace.core.messages import Failure
from headrace.errors import HeadraceError


class ControlFailure(HeadraceError):
    """A control request that was not carried out; nothing has changed.

    `status` is the HTTP status to answer with, `code` a stable name, `param` the field at fault.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def as_message(self) -> Failure:
        """The same for the socket."""
        return Failure(status=self.status, code=self.code, message=self.message, param=self.param)
