"""Measurements of a card's speed."""
