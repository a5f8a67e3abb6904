"""A plan of a toy model on two ranks, and its page."""

from __future__ import annotations

from dataclasses import replace

from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.plan import Plan, PlanRequest
from ppbench.planning.planner import make_plan, simulated
from ppbench.report.pages.plan import PlanPage

MIB = 2**20


def costs() -> CostSet:
    layer = StageCosts(2e6, 4e6, 2e6, 2e6, 0.01, 20 * MIB, 10 * MIB, 4 * MIB, 50 * MIB, MIB, 1e5)
    after = replace(layer, forward_ns=4e6, backward_ns=8e6, input_ns=4e6, weight_ns=4e6)
    before = replace(layer, forward_ns=1e5, backward_ns=1e5, input_ns=0, weight_ns=1e5)
    model = ModelCosts(before, (layer,) * 4, after)
    by_setting = {Setting(1, recompute=False): model}
    link = LinkCosts(1e5, 1e10, 0.05)
    return CostSet("drawn", "float32", 128, "adamw", "cpu", "drawn", by_setting, link)


def toy_plan() -> Plan:
    request = PlanRequest((2,), 700 * MIB, 8, 128, ("afab", "1f1b", "zb_h1", "auto"), (1,))
    return make_plan(request, costs(), effort=0.01)


def toy_page(plan: Plan | None = None) -> PlanPage:
    plan = plan or toy_plan()
    proposals = [one for one in (plan.first, plan.baseline) if one is not None]
    steps = [(one, simulated(plan, one)) for one in proposals]
    return PlanPage("toy on 2 ranks", plan, steps, "file costs.toml", [("Run", "x")], "ppbench")
