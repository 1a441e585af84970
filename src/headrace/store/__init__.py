"""What headrace keeps on disk: control data, the ledger, secrets. All of it SQLite and small files."""
