"""Pure limits: what a request may take at every level, decided together, all or nothing."""
