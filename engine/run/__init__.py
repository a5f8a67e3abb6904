"""A plan, executed: clocks, stages, channels, memory and the executor that ties them together."""
