"""A chat message as it travels from the gateway to the worker's chat template."""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message with its text in one piece. Roles: `system`, `user`, `assistant`."""

    role: str
    content: str
    is_cache_end: bool = False
    """The client marks everything up to the end of this message as worth keeping (`cache_control`)."""
