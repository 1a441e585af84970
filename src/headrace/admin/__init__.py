"""The admin API: a process and a port of its own, free to crash without touching traffic."""
