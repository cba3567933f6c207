"""Checks of process groups by real collectives, which name the waiting ranks when one hangs."""
