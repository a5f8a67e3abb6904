"""Which of several arms are the best, and what is known between the others.

    zb_h1 --beats--> 1f1b --same--> afab          best: zb_h1, interleaved_1f1b
    zb_h1 --open---- interleaved_1f1b             known: zb_h1 beats 1f1b by 7 %

An arm is among the best if no other is faster. The first choice is the one of them with the largest
mean gain over all others; its regret is what the fastest rival may gain on it, by the deciding
interval. The question which arm to take is answered once that is within the resolution: all others
are slower then, or the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.judge.estimates import combined, level_of
from ppbench.judge.evidence import Evidence, Metric, Noise
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.judge.noise import noise_of_launches, noise_of_rounds
from ppbench.judge.verdicts import LEVEL, Change, Verdict, judge
