"""From launches to verdicts: steps, tests, change points, bisection."""
