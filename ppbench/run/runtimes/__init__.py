"""What can run a case: one module per runtime."""
