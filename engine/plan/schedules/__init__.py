"""Schedules: one small pure function per family, found by name in `registry`."""
