"""Runtimes, which run a case: one module each."""
