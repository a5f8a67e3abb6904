"""From spans to figures: pure functions, the same for measured and simulated spans."""
