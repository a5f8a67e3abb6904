"""Figures of runs for Bencher, which tracks benchmarks.

A case must have the same name at every commit, or its history breaks. So the name depends on the
case alone, never on other exported cases: it has the usual settings, then all that differ from
their defaults, by the sweep file's keys. It ends with the fingerprint, since another machine is
another series.

    1f1b world_size=2 num_microbatches=8 seq_len=128 device=cpu model.preset=llama-8m on 3f2a91c0
"""

from __future__ import annotations

import json

import pandas as pd

from ppbench.config.case import CASE_KEYS, TIMES, Case, unknown_settings
from ppbench.display.cases import without_not_finite
from ppbench.display.units import is_missing
from ppbench.errors import UsageError
from ppbench.judge.verdicts import SPEED

_USUAL = ("world_size", "num_microbatches", "seq_len", "device", "model_preset")
_KEYS = {key.replace(".", "_"): key for key in CASE_KEYS}
_DEFAULTS = Case().settings()
EXPORTED = (SPEED, "bubble_fraction", "peak_memory_bytes")
"""The figures that are exported."""


def name_of(run: pd.Series) -> str:
    """Name of a case on a machine, whatever other cases there are.

    Where most settings are unknown, it begins with the name that its owner gave the workload.
    """
    unknown = unknown_settings(run["settings_told"])
    settings = {name: run[name] for name in _DEFAULTS if name not in ("schedule", *unknown)}
    if run["emulated_costs"]:
        settings = {name: value for name, value in settings.items() if name not in TIMES}
    assignments = [
        f"{_KEYS.get(name, name)}={value}"
        for name, value in settings.items()
        if name in _USUAL or value != _DEFAULTS[name]
    ]
    owner = [str(run["sweep_name"])] if unknown else []
    return " ".join([*owner, str(run["schedule"]), *assignments, "on", str(run["fingerprint"])])


def of_one_commit(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that are ok and have finite figures.

    Raises UsageError if there is none, or if they are of several commits.
    """
    finite = without_not_finite(runs)
    ok = finite[finite["status"] == "ok"]
    if ok.empty:
        raise UsageError(f"--format bencher: none of the {len(runs)} runs is ok; nothing to export")
    commits = ok[["commit", "changes"]].drop_duplicates()
    if len(commits) > 1:
        some = ", ".join(str(commit)[:9] for commit in commits["commit"].unique()[:4])
        raise UsageError(
            f"--format bencher: takes the runs of one commit, and these are of {len(commits)}: "
            f"{some}; name the runs of one, or leave them out for the last sweep"
        )
    return ok


def commit_text(runs: pd.DataFrame) -> str:
    """Commit of these runs, for a note: a backfill's last sweep is not of the newest commit.

    Empty if it is not known.
    """
    last = runs.iloc[-1]
    if is_missing(last["commit"]):
        return ""
    return f"{str(last['commit'])[:9]}{' with uncommitted changes' if last['is_dirty'] else ''}"


def bencher(runs: pd.DataFrame) -> str:
    """Bencher Metric Format: benchmark -> measure -> value, with its lowest and highest launch.

    A single launch has its stored interval over steps.
    https://bencher.dev/docs/reference/bencher-metric-format
    """
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, group in runs.groupby(runs.apply(name_of, axis=1), sort=False):
        of_case = figures[str(name)] = {}
        for column in EXPORTED:
            values = group[column].dropna().astype(float)
            if values.empty:
                continue
            low, high = values.min(), values.max()
            if len(values) == 1 and column == SPEED and group[f"{SPEED}_low"].notna().all():
                low, high = group[f"{SPEED}_low"].iloc[0], group[f"{SPEED}_high"].iloc[0]
            of_case[column] = {
                "value": float(values.median()),
                "lower_value": float(low),
                "upper_value": float(high),
            }
    return json.dumps(figures, indent=2, ensure_ascii=False)
