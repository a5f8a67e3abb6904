"""Ways to start the workers; each starts the same `ppbench.run.worker`."""
