"""The gate for CI: finds both sides, the thresholds and the accepted changes, and judges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ppbench.commits.bench import AT_ONCE, SILENT, Progress, read_tracked, rounds_of
from ppbench.commits.comparison import of_sweep, places_of
from ppbench.commits.gate import (
    GATED,
    Accepted,
    GateResult,
    accept_file,
    in_force,
    judge,
    limits_of,
    read_accepted,
)
from ppbench.comparison.contrasts import compare_sides
from ppbench.comparison.lines import SHOWN, read_metrics
from ppbench.comparison.measurement import measure_until_decided
from ppbench.comparison.sides import (
    SHORT,
    WORKTREE,
    Places,
    Side,
    both_fresh,
    find_side,
    revision_side,
)
from ppbench.config.sweep import Sweep, read_share
from ppbench.console import note
from ppbench.display.commands import command, near
from ppbench.errors import LaunchError, NotMeasuredError, UsageError
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import SPEED
from ppbench.store.columns import ATTACHED


def check(
    sweep: Path | str | None = None,
    *,
    base: str | None = None,
    head: str = WORKTREE,
    threshold: str | float | None = None,
    metrics: Sequence[str] = (),
    launches: int | None = None,
    max_launches: int | None = None,
    budget_s: float = 0.0,
    results: Path | str = Path("results"),
    progress: Progress = SILENT,
) -> GateResult:
    """Judge whether head may go in: no case worse than base by more than its threshold.

    The sweep file is by default that of head's runs, and the base the commit where head left the
    main branch. `sweep` may also be a training script: its attached runs are judged, with default
    limits. `threshold` is a share such as 0.02 or "2%". With `launches` both sides are
    measured first, so often each, and with `max_launches` until the verdicts are decided or
    `budget_s` seconds spent (0: no bound). Raises UsageError, NotMeasuredError, StoreError and
    SweepInterruptedError.
    """
    begun, folder = datetime.now(UTC), Path(results)
    script = None if sweep is None or Path(sweep).suffix == ".toml" else Path(sweep)
    if script is not None and not script.is_file():
        raise UsageError(
            f"{script}: no such file; give a sweep file (.toml), a training script whose runs were "
            "attached, or a results folder"
        )
    if script is not None and (launches or max_launches):
        raise UsageError(
            f"--run: measures a sweep file (.toml); {script} is a training script, so run it at "
            "both commits yourself, then check without --run"
        )
    tracked = None if sweep is None or script is not None else read_tracked(sweep)
    default = None if threshold is None else read_share("--threshold", threshold)
    read_metrics(metrics)

    def again(planned: Sweep | None) -> str:
        """What measures both sides: a check, or for attached runs their script."""
        if script is not None:
            return f"a run of {script} at it, attached under the same name"
        file = None if planned is None else planned.file
        named = None if head == WORKTREE else head
        return command("check", near(file), base=base, head=named, run=True, results=folder)

    def judged(
        base: str | None, head: str, *, is_fresh: bool = False, looks: Looks | None = None
    ) -> GateResult:
        """Judge two sides, with `is_fresh` by their launches of the last hour."""
        planned = tracked
        places = replace(places_of(planned, folder), check=again(planned))
        if script is not None:
            places = replace(places, folder=script.resolve().parent)
        last = find_side(head, places)
        is_attached = script is not None or last.origins == {ATTACHED}
        if planned is None and not is_attached:
            # The one that head's runs come from; its thresholds must not be lost without a note.
            rows = last.failed if last.runs.empty else last.runs
            files = sorted(set(rows["sweep_file"].dropna()))
            names = ", ".join(files)
            if len(files) == 1 and Path(files[0]).exists():
                planned = read_tracked(files[0])
            elif files:
                why = f"{names} not found" if len(files) == 1 else f"head's runs come from {names}"
                lost = "no thresholds and accepted changes of a sweep file are used"
                text = f"{why}, so {lost}; name one: ppbench check SWEEP"
                last = replace(last, notes=(*last.notes, text))
            places = replace(places_of(planned, folder), check=again(planned))
        first = _base(base, last, places)
        if set(first.runs["run_id"]) & set(last.runs["run_id"]):
            raise UsageError(
                f"base ({first.title}) and head ({last.title}): are the same runs; name two"
            )
        if is_fresh:
            first, last = both_fresh(first, last, begun)
        # The file that was found may have other cases by now: only a named one chooses cases.
        first, last = of_sweep(first, tracked), of_sweep(last, tracked)
        if script is not None:
            first, last = first.of_script(script), last.of_script(script)
        # Without tokens per step a training has no throughput: then its step is gated.
        usual, also = GATED, SHOWN
        if is_attached and not last.runs[SPEED].notna().any():
            usual, also = ("step_ns", *GATED[1:]), ("step_ns", *SHOWN[1:])
        gated, shown = read_metrics(metrics, usual), read_metrics([*metrics, *also])
        accepted: list[Accepted] = []  # the entries in force between base and head
        accepting = None if planned is None else accept_file(planned)
        if accepting is not None:
            repository = places.repository()
            entries = read_accepted(accepting, repository)
            unforced = [
                f"{accepting}: an entry is not in force: {entry.problem}; delete it if its commit "
                "was squashed or rebased away, or name the new one"
                for entry in entries
                if entry.problem
            ]
            last = replace(last, notes=(*last.notes, *unforced))
            if first.commit is not None and last.commit is not None:
                accepted = in_force(entries, repository, first.commit, last.commit)
        limits = limits_of(planned, default, accepted, has_all=tracked is not None)
        limits = limits if script is None else replace(limits, file=str(script))
        compared = compare_sides(
            first,
            last,
            shown,
            limits.resolution_of,
            again=again(planned),
            looks=looks,
            sweep_file=None if tracked is None else tracked.file,
        )
        return judge(compared, gated, limits)

    if launches is None and max_launches is None:
        return judged(base, head)
    with rounds_of(tracked, base, head, folder, progress) as rounds:
        try:
            if max_launches is not None:
                result, stopped = measure_until_decided(
                    max_launches,
                    rounds.bring_to,
                    lambda looks: judged(*rounds.names, is_fresh=True, looks=looks),
                    lambda result: result.comparison,
                    {metric.name for metric in read_metrics(metrics, GATED)},
                    progress.say,
                    budget_s,
                    AT_ONCE,
                )
                return replace(result, comparison=replace(result.comparison, stopped=stopped))
            rounds.bring_to(launches or 0)
        except LaunchError as error:  # it has rows, and is a failure like any other
            note(f"warning: {error}")
            return judged(base, head, is_fresh=True)
        return judged(*rounds.names, is_fresh=True)


def _base(name: str | None, head: Side, places: Places) -> Side:
    """The named side, else the default base, else its nearest ancestor that was measured."""
    if name is not None:
        return find_side(name, places)
    if head.commit is None:
        raise UsageError(
            f"--base: is missing; {head.title} is not one commit, which would have one"
        )
    repository = places.repository()
    sha = repository.default_base(head.commit if head.is_clean else None)
    try:
        return revision_side(sha, sha, repository, places)
    except NotMeasuredError as error:
        # Its newest ancestor whose clean runs have a case and machine of head.
        runs = places.store.runs(["case_id", "fingerprint", "commit", "status", "is_dirty"])
        is_like = runs["case_id"].isin(head.runs["case_id"])
        is_like &= runs["fingerprint"].isin(head.runs["fingerprint"])
        clean = runs[is_like & (runs["status"] == "ok") & ~runs["is_dirty"].eq(True)]
        order = repository.positions(clean["commit"].dropna().unique())
        newest_first = sorted(order, key=lambda commit: -order[commit])
        nearest = next((one for one in newest_first if repository.is_ancestor(one, sha)), None)
        if nearest is None:
            raise NotMeasuredError(f"base {error}") from None
        side = revision_side(nearest, nearest, repository, places)
        text = (
            f"base would be {sha[:SHORT]}, which is not measured; {nearest[:SHORT]} is the nearest "
            "of its ancestors that is"
        )
        return replace(side, notes=(text, *side.notes))
