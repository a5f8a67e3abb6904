"""Messages between stages: the only user of torch's point-to-point calls."""
