"""Simulated fleets under the production queue and admission: no clock, no network, nothing but arguments."""
