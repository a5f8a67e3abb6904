"""Training runs that ppbench did not start: read from traces, or watched from inside."""
