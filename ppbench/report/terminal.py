def draw_steps(steps, console): return ""
