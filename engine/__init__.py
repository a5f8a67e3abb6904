"""A pipeline-parallel trainer whose schedule is data and whose every action is timed.

Reading order: `plan` (what should happen), `model` (what a stage is made of), `run` (making it
happen), `trainer` (one configuration, ready to step), `train` (the command line).
"""
