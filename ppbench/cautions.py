"""Every warning that a run can carry, each with its remedy.

A caution neither hides nor changes a figure; it is stored with the run and shown in every listing
and report.
"""

from __future__ import annotations

from enum import Enum


class Caution(Enum):
    """Each caution's name, with what is wrong and what to do about it; the most severe first."""

    not_finite = (
        "A loss or gradient was NaN or infinite (not_finite_step, not_finite_rank and "
        "not_finite_what of the run): the model learnt nothing afterwards, and the timed steps are "
        "not those of the intended training. Lower train.learning_rate, set train.clip_norm, or "
        "choose another model.dtype; check the weights of the model's factory or checkpoint."
    )
    oversubscribed = (
        "More rank threads than CPU cores: ranks took turns, so bubble and step time say nothing "
        "about the schedule. Use no more ranks than devices."
    )
    time_sliced = (
        "Several ranks were on one GPU, which computes for one process at a time: their spans "
        "contain each other's work, so step time says nothing about the schedule, and no bubble "
        "or MFU is given. Use no more ranks on a machine than it has GPUs."
    )
    noisy_steps = (
        "Step times vary by more than 10 % (median absolute deviation over median). Stop other "
        "work on the machine or raise measure.steps."
    )
    unsettled_steps = (
        "Steps were still getting faster when measuring began. Raise measure.max_warmup_steps "
        "or measure.warmup_steps."
    )
    behind_plan = (
        "The emulated step took over 5 % longer than planned: the machine's own cost of messages "
        "and process switches is visible. Raise the emulated times, use fewer ranks or smaller "
        "messages, or stop other work on the machine."
    )
    coarse_clock = (
        "Some spans are shorter than the error of the ranks' clocks (clock_error_ns of the "
        "ranks): which rank waited for which is uncertain at this scale. Use larger microbatches, "
        "or a faster network between the nodes."
    )
    busy_machine = (
        "Other processes kept more than a tenth of the cores busy during the run (other_load_cores "
        "of the ranks). Stop them or use another machine."
    )
    throttled = (
        "A GPU lowered its clock for power or heat, or a hypervisor or quota held the CPU back "
        "(gpu_throttle_reasons, steal_fraction, cpu_throttled_fraction of the ranks): the speed "
        "will not be reproduced. Check cooling and power limits, lock the clocks, or raise the "
        "quota."
    )
    bare_stage = (
        "A stage has no parameters (0 in parameters_per_stage of the run), although no list of "
        "layers asked for that: its rank trains nothing. Use fewer ranks or stages per rank, "
        "another model.partition, or other split points."
    )
    few_steps = "Fewer than 3 measured steps: the median is unreliable. Raise measure.steps."
    no_warmup = (
        "No warm-up steps: the first measured step includes allocations and cold caches. "
        "Set measure.warmup_steps to 1 or more."
    )

    @property
    def remedy(self) -> str:
        return self.value

    @property
    def deed(self) -> str:
        """The advice that removes it: the sentences after the first, which says what is wrong."""
        return self.value.partition(". ")[2].removesuffix(".")


MAX_RELATIVE_DEVIATION = 0.10
MAX_OVER_PLAN = 1.05
MIN_STEPS = 3
