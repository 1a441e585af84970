"""Process roles: what starts, watches and stops what."""
