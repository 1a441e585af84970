"""Settings: their names, defaults and bounds. Reading them is the only thing done here."""
