"""Costs for a plan: what they are, and where they come from.

measured here     cost_measurement   a process with torch runs layer by layer
a file            cost_file          for a cluster that one does not have
a run             run_costs          what a stored run shows of its stages
the store         stored_costs       what was measured before
"""

from ppbench.planning.cost_file import read_costs_file, write_costs_file
from ppbench.planning.cost_measurement import measure_costs
from ppbench.planning.cost_set import MEASURED, CostSet, Setting, parts_of, problem_of
from ppbench.planning.run_costs import costs_of_run
from ppbench.planning.stored_costs import Wanted, store_costs, stored_cost_set

__all__ = [
    "MEASURED",
    "CostSet",
    "Setting",
    "Wanted",
    "costs_of_run",
    "measure_costs",
    "parts_of",
    "problem_of",
    "read_costs_file",
    "store_costs",
    "stored_cost_set",
    "write_costs_file",
]
