"""Plans without runs: schedules listed, drawn, checked, exported and simulated."""
