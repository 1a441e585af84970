"""Pure ledger rules: which record opens and which ends an operation."""
