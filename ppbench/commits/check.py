"""The gate for CI: finds both sides, the thresholds and the accepted changes, and judges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ppbench.commits.bench import SILENT, Progress, read_tracked, rounds_of
from ppbench.commits.comparison import measured, places_of
from ppbench.commits.gate import GATED, GateResult, Limits, in_force, judge
from ppbench.comparison.contrasts import compare_sides
from ppbench.comparison.lines import SHOWN, Comparison, read_metrics
from ppbench.comparison.sides import SHORT, WORKTREE, Places, Side, find_side, revision_side
from ppbench.config.sweep import Sweep, read_share
from ppbench.console import note
from ppbench.display.commands import command, near
from ppbench.errors import LaunchError, NotMeasuredError, UsageError
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import SPEED
from ppbench.store import Store
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
    share = None if threshold is None else read_share("--threshold", threshold)
    read_metrics(metrics)

    def places_for(planned: Sweep | None) -> Places:
        """Where names are looked up, and what measures both sides."""
        if script is not None:  # attached runs
            again = f"a run of {script} at it, attached under the same name"
            return Places(Store(folder), script.resolve().parent, again)
        file = near(None if planned is None else planned.file)
        named = None if head == WORKTREE else head
        again = command("check", file, base=base, head=named, run=True, results=folder)
        return places_of(planned, folder, again)

    planned, places = tracked, places_for(tracked)

    def compared(
        base: str | None, last: Side, since: datetime | None = None, looks: Looks | None = None
    ) -> Comparison:
        first = _base(base, last, places)
        if script is not None:
            first, last = first.of_script(script), last.of_script(script)
        # The file that was found may have other cases by now: only a named one chooses cases.
        again, limit = places.again, limits.resolution_of
        return compare_sides(
            first, last, shown, limit, again=again, sweep=tracked, since=since, looks=looks
        )

    # Without tokens per step an attached training has no throughput: then its step is gated.
    usual, also, last = GATED, SHOWN, None
    is_measured = launches is not None or max_launches is not None
    if not is_measured:
        last = find_side(head, places)
        is_attached = script is not None or last.origins == {ATTACHED}
        if is_attached and not last.runs[SPEED].notna().any():
            usual, also = ("step_ns", *GATED[1:]), ("step_ns", *SHOWN[1:])
        if planned is None and not is_attached:
            planned, last = _sweep_of(last)
            places = places_for(planned)
    gated, shown = read_metrics(metrics, usual), read_metrics([*metrics, *also])
    limits = Limits(planned, share, has_all=tracked is not None)
    if last is not None:
        comparison = compared(base, last)
    else:
        until = (launches, max_launches, budget_s, [metric.name for metric in gated])
        with rounds_of(tracked, base, head, folder, progress) as rounds:

            def look(looks: Looks | None) -> Comparison:
                first, last = rounds.names
                return compared(first, find_side(last, places), begun, looks)

            try:
                comparison = measured(rounds, *until, look)
            except LaunchError as error:  # it has rows, and is a failure like any other
                note(f"warning: {error}")
                comparison = compared(base, find_side(head, places), begun)
    entries = () if planned is None else planned.track.accept
    if entries:
        for entry in entries:
            if entry.metric is not None:
                read_metrics([entry.metric], option="track.accept: metric")
        commits = comparison.base.commit, comparison.head.commit
        accepted, unknown = in_force(entries, places.repository(), *commits)
        limits = replace(limits, accepted=tuple(accepted))
        comparison = replace(comparison, notes=(*unknown, *comparison.notes))
    file = None if planned is None else planned.file
    return judge(comparison, gated, limits, file if script is None else str(script))


def _sweep_of(side: Side) -> tuple[Sweep | None, Side]:
    """The sweep file that its runs come from; where it is lost, the side has a note of that."""
    rows = side.failed if side.runs.empty else side.runs
    files = sorted(set(rows["sweep_file"].dropna()))
    names = ", ".join(files)
    if len(files) == 1 and Path(files[0]).exists():
        return read_tracked(files[0]), side
    if not files:
        return None, side
    why = f"{names} not found" if len(files) == 1 else f"head's runs come from {names}"
    lost = "no thresholds and accepted changes of a sweep file are used"
    text = f"{why}, so {lost}; name one: ppbench check SWEEP"
    return None, replace(side, notes=(*side.notes, text))


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
