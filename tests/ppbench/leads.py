"""Judges pairs of arms together, and orders the arms."""

from __future__ import annotations

from collections.abc import Mapping

from ppbench.judge.evidence import Evidence, Metric
from ppbench.judge.lead import Lead, Pair, lead_of
from ppbench.judge.verdicts import judge


def lead(metric: Metric, pairs: Mapping[Pair, Evidence], num_arms: int) -> Lead:
    """Order the arms of these pairs, each in one of its orders."""
    judged = judge(metric, list(pairs.values()))
    return lead_of(metric, dict(zip(pairs, judged, strict=True)), range(num_arms))
