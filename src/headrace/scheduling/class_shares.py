"""How two classes share: interactive goes first, but batch keeps a floor while it waits."""

from headrace.scheduling.policy import ServiceClass


class ClassShares:
    """Counts what batch is owed. Only what is granted while both wait counts, so nothing is saved up."""

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self.owed = 0.0
        """Cost that batch is behind its floor; below zero, ahead of it."""

    @property
    def is_batch_turn(self) -> bool:
        return self.owed > 0

    def granted(self, service_class: ServiceClass, cost: float, *, does_other_wait: bool) -> None:
        """Something was granted. `does_other_wait`: the other class has requests waiting too."""
        if not does_other_wait:
            self.nobody_waits()
        elif service_class == "batch":
            self.owed -= cost * (1 - self.floor)
        elif not self.is_batch_turn:
            # On its turn and passed over, batch could not use what it is owed: then it is owed no more.
            self.owed += cost * self.floor

    def nobody_waits(self) -> None:
        """What was granted kept nobody of the other class waiting."""
        self.owed = 0.0
