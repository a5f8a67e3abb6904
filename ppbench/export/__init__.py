"""Runs in the forms that other tools read: Chrome's trace events, Bencher's metrics."""
