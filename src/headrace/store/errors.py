"""Errors of the stores. SQLite's own errors are translated here and in the modules that open files."""

from headrace.errors import HeadraceError


class StoreUnavailable(HeadraceError):
    """The disk does not take or give data right now (full, locked, failing). Trying later may help."""


class LedgerConflict(HeadraceError):
    """An operation was reserved or settled against the ledger's rules: our own mistake, never a client's."""


class OperationUnknown(LedgerConflict):
    """No operation of this id was ever reserved or refused."""


class OperationOpen(LedgerConflict):
    """The operation has not ended, so it cannot be corrected yet."""
