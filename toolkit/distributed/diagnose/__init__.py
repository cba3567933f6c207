"""Checks of process groups by real collectives, with the ranks that wait named when one hangs."""
