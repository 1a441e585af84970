"""A chat message as it travels from the gateway to the worker's chat template."""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message with its text in one piece. Roles: `system`, `user`, `assistant`."""

    role: str
    content: str
