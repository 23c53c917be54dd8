"""Measurements; each module prints a table and returns its numbers."""
