"""Figures for other trackers of benchmarks: Bencher, github-action-benchmark, otava.

A case must have the same name at every commit, or its history breaks. So the name depends on the
case alone, never on other exported cases: it has the usual settings, then all that differ from
their defaults, by the sweep file's keys. It ends with the fingerprint, since another machine is
another series.

    1f1b world_size=2 num_microbatches=8 seq_len=128 device=cpu model.preset=llama-8m on 3f2a91c0
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from ppbench.config.case import TIMES, Case, unknown_settings
from ppbench.config.schema import known_keys
from ppbench.display.cases import without_not_finite
from ppbench.display.fields import FIELDS, Direction, figure
from ppbench.display.formats import ExportFormat
from ppbench.display.units import is_missing
from ppbench.errors import UsageError
from ppbench.statistics.verdicts import SPEED

_USUAL = ("world_size", "num_microbatches", "seq_len", "device", "model_preset")
_KEYS = {key.replace(".", "_"): key for key in known_keys()}
_DEFAULTS = Case().settings()
EXPORTED = (SPEED, "bubble_fraction", "peak_memory_bytes")
"""The figures that are exported."""
_SIGNS = {Direction.higher: 1, Direction.lower: -1}
"""Directions as otava writes them."""
LEAST_FILLED = 0.5
"""Share of commits that must have a value for a column to be written for otava."""


@dataclass(frozen=True)
class Otava:
    """A file for otava, the configuration that reads it, and a note on what was left out."""

    text: str
    config: str
    num_commits: int
    left_out: str  # in words; empty: nothing


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


def measured(runs: pd.DataFrame, how: ExportFormat) -> pd.DataFrame:
    """The runs that are ok and have finite figures. Raises UsageError if there is none."""
    finite = without_not_finite(runs)
    ok = finite[finite["status"] == "ok"]
    if ok.empty:
        raise UsageError(f"--format {how}: none of the {len(runs)} runs is ok; nothing to export")
    return ok


def of_one_commit(runs: pd.DataFrame, how: ExportFormat) -> pd.DataFrame:
    """The runs of `measured`. Raises UsageError if they are of several commits."""
    ok = measured(runs, how)
    commits = ok[["commit", "changes"]].drop_duplicates()
    if len(commits) > 1:
        some = ", ".join(str(commit)[:9] for commit in commits["commit"].unique()[:4])
        raise UsageError(
            f"--format {how}: takes the runs of one commit, and these are of {len(commits)}: "
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


def otava_history(runs: pd.DataFrame, file: str) -> Otava:
    """Return otava's files for the runs of clean commits. Raises UsageError if there are none."""
    ok = measured(runs, ExportFormat.otava)
    clean = ok[ok["commit"].notna() & ~ok["is_dirty"].eq(True)]
    if clean.empty:
        raise UsageError("--format otava: none of the runs is of a commit without changes")
    made = otava(clean, file)
    if made.num_commits == 0:
        raise UsageError(
            "--format otava: no commit has every figure, and otava takes no gaps; name the runs of "
            "fewer cases"
        )
    return made


def bencher(runs: pd.DataFrame) -> str:
    """Bencher Metric Format: benchmark -> measure -> value, with its lowest and highest launch.

    https://bencher.dev/docs/reference/bencher-metric-format
    """
    return json.dumps(
        {
            name: {column: _bounded(group, column) for column in EXPORTED if _has(group, column)}
            for name, group in _by_name(runs)
        },
        indent=2,
        ensure_ascii=False,
    )


def github(runs: pd.DataFrame) -> str:
    """The tokens/s alone, for github-action-benchmark with `tool: customBiggerIsBetter`.

    The other figures are better when smaller, and a file is of one direction.
    https://github.com/benchmark-action/github-action-benchmark
    """
    entries = [_entry(name, group) for name, group in _by_name(runs) if _has(group, SPEED)]
    return json.dumps(entries, indent=2, ensure_ascii=False)


def otava(runs: pd.DataFrame, file: str) -> Otava:
    """A row per commit, oldest first, and a column per case and figure: medians over launches.

    otava takes no empty cells: columns that fewer than half of the commits have are left out, then
    the commits that lack a figure. A column called `branch` would make it refuse commits of
    several. https://otava.apache.org
    """
    named = runs.assign(name=runs.apply(name_of, axis=1), time=_times(runs))
    figures = {
        (str(name), column): group.groupby("commit")[column].median()
        for name, group in named.groupby("name", sort=False)
        for column in EXPORTED
    }
    wide = pd.DataFrame(figures).dropna(axis="columns", how="all")
    is_usual = wide.notna().mean() >= LEAST_FILLED
    whole = wide.loc[:, is_usual].dropna()
    of_commit = named.groupby("commit")[["time", "subject"]].first().loc[whole.index]
    columns = [column for column in figures if column in whole]
    rows = of_commit.join(whole.set_axis([" ".join(column) for column in columns], axis=1))
    text = rows.sort_values("time", kind="stable").reset_index()
    text.insert(0, "time", text.pop("time"))
    left_out = _left_out(int((~is_usual).sum()), len(wide) - len(whole))
    config = _otava_config(file, columns)
    return Otava(text.to_csv(index=False).rstrip("\n"), config, len(whole), left_out)


def _left_out(num_columns: int, num_commits: int) -> str:
    parts = [
        f"columns that few commits have ({num_columns})" if num_columns else "",
        f"commits that lack a figure ({num_commits})" if num_commits else "",
    ]
    return " and ".join(part for part in parts if part)


def _times(runs: pd.DataFrame) -> pd.Series:
    """Time of the commit, in UTC; the time of measuring if that is not known."""
    dates = runs["author_date"].fillna(runs["created_at"])
    return pd.to_datetime(dates, utc=True, format="ISO8601").dt.strftime("%Y-%m-%dT%H:%M:%S+00:00")


def _otava_config(file: str, columns: Iterable[tuple[str, str]]) -> str:
    metrics = [
        f"      {json.dumps(f'{name} {column}')}: {{direction: {_SIGNS[FIELDS[column].direction]}}}"
        for name, column in columns
    ]
    lines = [
        "tests:",
        "  ppbench:",
        "    type: csv",
        f"    file: {json.dumps(file)}",
        "    time_column: time",
        "    attributes: [commit]",
        "    csv_options: {delimiter: ',', quote_char: '\"'}",
        "    metrics:",
        *metrics,
    ]
    return "\n".join(lines)


def _by_name(runs: pd.DataFrame) -> Iterable[tuple[str, pd.DataFrame]]:
    names = runs.apply(name_of, axis=1)
    return ((str(name), group) for name, group in runs.groupby(names, sort=False))


def _has(runs: pd.DataFrame, column: str) -> bool:
    return bool(runs[column].notna().any())


def _bounded(runs: pd.DataFrame, column: str) -> dict[str, float]:
    """Median and range over launches; a single launch has its stored interval over steps."""
    values = runs[column].dropna().astype(float)
    low, high = values.min(), values.max()
    if len(values) == 1 and column == SPEED and runs[f"{SPEED}_low"].notna().all():
        low, high = float(runs[f"{SPEED}_low"].iloc[0]), float(runs[f"{SPEED}_high"].iloc[0])
    return {"value": float(values.median()), "lower_value": float(low), "upper_value": float(high)}


def _entry(name: str, runs: pd.DataFrame) -> dict[str, object]:
    speed = _bounded(runs, SPEED)
    half = (speed["upper_value"] - speed["lower_value"]) / 2
    others = {column: runs[column].median() for column in EXPORTED if column != SPEED}
    extra = [
        f"launches: {len(runs)}",
        *(
            f"{FIELDS[column].label}: {figure(column, value)}"
            for column, value in others.items()
            if not pd.isna(value)
        ),
    ]
    return {
        "name": name,
        "unit": FIELDS[SPEED].unit.name,
        "value": speed["value"],
        "range": f"± {half:.4g}",
        "extra": "\n".join(extra),
    }
