"""Measurements: `mirror-sd bench`. Never part of a test that can fail by time."""
