"""What to run: plans of sweep files, and trials of what they propose."""
