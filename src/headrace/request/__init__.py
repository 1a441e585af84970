"""What travels with a request between processes, in plain values."""
