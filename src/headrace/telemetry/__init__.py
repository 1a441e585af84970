"""Logs and metrics: their form, not their meaning."""
