"""How the next token is drawn."""

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one sequence. `temperature` 0 is greedy and ignores the rest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int = 0
    """Always set, 32 bit: the gateway draws one when the client gave none, so a run can be repeated."""
