"""What each command does, from parsed arguments to printed text. The command line calls these."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.status import Status

from ppbench import explain as explaining
from ppbench.analysis.metrics import MEDIAN
from ppbench.analysis.post_mortem import in_words
from ppbench.config.bare_stages import notes_on_stages
from ppbench.config.case import untold
from ppbench.config.places import Launcher
from ppbench.config.selection import Only
from ppbench.config.sweep import Sweep
from ppbench.config.sweep_file import read_sweep
from ppbench.errors import (
    LaunchError,
    SweepInterruptedError,
    first_line,
)
from ppbench.format import Format
from ppbench.listing import as_records, facts, render
from ppbench.report.index import check_not_index, update_index
from ppbench.report.page import write_report
from ppbench.report.provenance import NOT_RECORDED
from ppbench.report.terminal import draw_steps
from ppbench.report.timeline_page import run_names, write_timeline
from ppbench.report.timelines import steps_of
from ppbench.run.architectures import CheckProgress, check_architectures
from ppbench.run.environment import default_device, read_environment
from ppbench.run.launch.slurm import FIRST_PORT, NUM_PORTS, SlurmJob
from ppbench.run.launch.torchrun import WORKER, Launches, Meeting, launches_of, meeting_of
from ppbench.run.overhead import Rounds, measure_overhead
from ppbench.run.sweep import (
    Choice,
    planned_cases,
    runs_of,
)
from ppbench.store import check_writable
from ppbench.stored import BULKY, WORKLOAD, open_store, tell
from ppbench.sweeping import run_missing, words_of

EXIT_NOT_EXACT = 1
EXIT_FAILED_RUNS = 4
FIGURES = [
    "tokens_per_s",
    "step_ns",
    "bubble_fraction",
    "bubble_fraction_theory",
    "peak_memory_bytes",
    "cautions",
]
RANK_COLUMNS = [
    "rank",
    "device",
    "stages",
    "num_layers",
    "num_parameters",
    "compute_ns",
    "idle_fraction",
    "peak_memory_bytes",
    "peak_held_microbatches",
    "planned_peak_held_microbatches",
    "clock",
    "clock_error_ns",
]
STEP_COLUMNS = [
    "step",
    "num_tokens",
    "step_ns",
    "optimizer_ns",
    "tokens_per_s",
    "bubble_fraction",
    "loss",
    "is_outlier",
]
MEMORY_COLUMNS = [
    "rank",
    "peak_memory_bytes",
    "predicted_peak_memory_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "activation_bytes",
    "reserved_bytes",
    "process_peak_bytes",
]
MACHINE_COLUMNS = [
    "rank",
    "hostname",
    "other_load_cores",
    "watched_cores",
    "steal_fraction",
    "cpu_throttled_fraction",
    "cpu_mhz",
    "cpu_energy_j",
    "gpu_power_w",
    "gpu_energy_j",
    "gpu_utilization",
    "gpu_sm_mhz",
    "gpu_temperature_c",
    "gpu_throttle_reasons",
    "gpu_memory_used_bytes",
]
STAGE_LISTS = {
    "num_layers": "layers_per_stage",
    "num_parameters": "parameters_per_stage",
    "stage_share": "stage_shares",
}
"""A column of the table of stages, and the run's column that holds it as a list."""
RATIO_COLUMNS = [
    "step_off_ns",
    *(
        f"{name}_ratio{end}"
        for name in ("flight", "spans", "profiler")
        for end in ("", "_low", "_high")
    ),
    "num_rounds",
]
CHECK_COLUMNS = [
    "architecture",
    "status",
    "dtype",
    "loss_difference",
    "gradient_difference",
    "num_parameters",
    "seconds",
    "reason",
]
TOLD_OF_FAILURE = ["error", "last_actions"]


@dataclass(frozen=True)
class SweepOutcome:
    """What `ppbench sweep` prints and returns."""

    table: str
    report: Path | None
    exit_code: int


def list_cases(file: Path, overrides: Sequence[str], only: Only, how: Format) -> str:
    """The chosen cases of a sweep file, none of them run."""
    read = read_sweep(file, overrides, default_device())
    planned = dataclasses.replace(read, cases=only.select(read.cases))
    columns = ["case_id", *(planned.axes or WORKLOAD)]
    _note_stages(planned)
    return render(planned_cases(planned), how, columns)


def _note_stages(read: Sweep) -> None:
    for note in notes_on_stages((case for case, _ in read.cases), read.facts):
        tell(f"note: {note}")


def sweep(
    file: Path,
    overrides: Sequence[str],
    results: Path,
    reports: Path | None,
    choice: Choice,
    how: Format,
) -> SweepOutcome:
    """Run what is missing of a sweep, then report on all of it; `reports` None: in a table only.

    When the workers cannot go on, what is finished is reported all the same. Raises
    SweepInterruptedError, which says how to go on.
    """
    read = read_sweep(file, overrides, default_device())
    store = open_store(results)
    check_writable(results, "--results")
    if reports is not None:
        check_writable(reports, "--reports")
    command = _command_line(file, overrides, results, reports)
    _note_stages(dataclasses.replace(read, cases=choice.only.select(read.cases)))
    plan = run_missing(read, store, choice, command)
    runs = runs_of(plan, store)
    path = None
    if reports is not None:
        path = reports / f"{read.name}-{plan.sweep_id}.html"
        text = file.read_text(encoding="utf-8")
        write_report(path, store, runs, title=read.name, command=command, sweep_text=text)
        update_index(reports, tell)
    figures = [*FIGURES[:2], "planned_step_ns", *FIGURES[2:]] if _is_emulated(read) else FIGURES
    told = [name for name in figures if name == "cautions" or runs[name].notna().any()]
    table = render(runs, how, ["run_id", *_shown_axes(read), "status", *told])
    good = set(runs.loc[runs["status"] == "ok", "resume_key"])
    all_ok = good.issuperset(item.resume_key for item in plan.chosen)
    return SweepOutcome(table, path, 0 if all_ok else EXIT_FAILED_RUNS)


def sweep_elsewhere(
    launcher: Launcher,
    file: Path,
    overrides: Sequence[str],
    results: Path,
    choice: Choice,
    *,
    is_dry_run: bool,
) -> str:
    """Run this node's part of a sweep under torchrun, or submit it to Slurm; what there is to say.

    A dry run says what would be run, and runs nothing. Raises SweepInterruptedError.
    """
    read = read_sweep(file, overrides, default_device())
    choice.only.select(read.cases)  # what matches nothing is refused here, not by every node
    words = [word for override in overrides for word in ("--set", override)]
    program = [WORKER, str(file), "--results", str(results), *words, *words_of(choice)]
    if launcher is Launcher.torchrun:
        launches, meeting = launches_of(read, read.torchrun.nodes, program), meeting_of(read)
        if is_dry_run:
            return "\n".join(map(shlex.join, launches.commands(meeting)))
        try:
            launches.run(meeting)
        except KeyboardInterrupt:
            command = ["ppbench", "sweep", *program[1:], "--launcher", launcher.value]
            raise SweepInterruptedError(
                "stopped; the runs that are done are kept, on the first node. Go on with, on every "
                f"node: {shlex.join(command)}"
            ) from None
        return ""
    launches = launches_of(read, read.slurm.nodes, program)
    job = SlurmJob(read, results, launches)
    if is_dry_run:
        return "\n".join([job.script(), *_as_comments(launches)])
    check_writable(results, "--results")
    return f"job {job.submit()}; its logs: {results / 'slurm'}"


def _as_comments(launches: Launches) -> list[str]:
    """What the nodes of a job run, for whoever reads its script."""
    commands = launches.commands(Meeting("FIRST_HOST", FIRST_PORT, "JOB"))
    told = f"# which runs on each node (the port is {FIRST_PORT} + JOB % {NUM_PORTS}):"
    return [told, *(f"#   {shlex.join(command)}" for command in commands)]


def _is_emulated(read: Sweep) -> bool:
    return any(case.is_emulated for case, _ in read.cases)


def _shown_axes(read: Sweep) -> list[str]:
    is_repeated = any(measure.launches > 1 for _, measure in read.cases)
    return [*(read.axes or WORKLOAD), *(["launch"] if is_repeated else [])]


def _command_line(file: Path, overrides: Sequence[str], results: Path, reports: Path | None) -> str:
    """What makes the same sweep again, into the same folders."""
    words = [word for override in overrides for word in ("--set", override)]
    for option, folder in (("results", results), ("reports", reports)):
        if folder is None:
            words.append("--no-report")
        elif folder != Path(option):
            words += [f"--{option}", str(folder)]
    return shlex.join(["ppbench", "sweep", str(file), *words])


def show(name: str, results: Path, how: Format) -> str:
    """One run: its row, its stages, its ranks, its steps; of a failed one how it failed first."""
    store = open_store(results)
    run = store.find(name)
    profiles = store.profiles_of(run["run_id"])
    row = as_records(pd.DataFrame([run]))[0]
    row["profiles"] = str(profiles) if profiles.is_dir() else None
    row["verified"] = row["verified"] or NOT_RECORDED
    ranks, steps, flight = (
        store.table(table, [run["run_id"]]) for table in ("ranks", "steps", "flight")
    )
    if how is Format.json:
        tables = {"ranks": ranks, "steps": steps, "flight": flight}
        data = {"run": row, **{name: as_records(table) for name, table in tables.items()}}
        return json.dumps(data, indent=2, allow_nan=False)
    if how is Format.csv:
        return facts(row, how)
    failure = _failure(row, flight, how) if run["status"] != "ok" else []
    hidden = {*BULKY, *(TOLD_OF_FAILURE if failure else []), *untold(row["settings_told"])}
    known = {
        key: value for key, value in row.items() if value not in (None, "") and key not in hidden
    }
    parts = [*failure, facts(known, how)]
    if not (stages := _stages_of(row)).empty:
        parts.append(render(stages, how, ["stage", *STAGE_LISTS]))
    for frame, columns in (
        (ranks, RANK_COLUMNS),
        (ranks, MEMORY_COLUMNS),
        (ranks, MACHINE_COLUMNS),
        (steps, STEP_COLUMNS),
    ):
        told = [name for name in columns if frame[name].notna().any()]
        if len(told) > 1:
            parts.append(render(frame, how, told))
    parts += [f"note: {note}" for note in ranks["telemetry_note"].dropna().unique() if note]
    return "\n\n".join(parts)


def _failure(row: Mapping[str, object], flight: pd.DataFrame, how: Format) -> list[str]:
    """How a run failed, what each rank was doing, and the whole error where there is more of it."""
    error = str(row["error"] or "no error was recorded").strip()
    where = "" if row["error_rank"] is None else f" at rank {row['error_rank']}"
    parts = [f"{row['status']}{where}: {first_line(error)}"]
    if not flight.empty:
        told = in_words(flight)
        parts.append(render(told, how, list(map(str, told))))
    if error != first_line(error):
        parts.append(f"```\n{error}\n```" if how is Format.markdown else error)
    return parts


def _stages_of(row: Mapping[str, object]) -> pd.DataFrame:
    """What the partition gave to each stage; a list that an older version did not store is null."""
    lists = {name: row[column] for name, column in STAGE_LISTS.items()}
    columns = {name: json.loads(str(text)) for name, text in lists.items() if text is not None}
    stages = pd.DataFrame(columns).reindex(columns=list(STAGE_LISTS))
    return stages.rename_axis("stage").reset_index()


def explain(name: str, results: Path, how: Format) -> str:
    """Where one run's idle time went."""
    return explaining.explain(name, open_store(results), how)


def report(names: Sequence[str], output: Path | None, results: Path, reports: Path) -> Path:
    """Write a report of the named runs, or of the last sweep's; returns its path."""
    store = open_store(results)
    runs = store.named(names).sort_values("run_id") if names else store.last_sweep()
    last = runs.iloc[-1]
    title = str(last["sweep_name"]).replace("/", "-")
    # Chosen runs get a file of their own: the sweep's report stays as it is.
    default = f"report-{last['run_id']}" if names else f"{title}-{last['sweep_id']}"
    path = output or reports / f"{default}.html"
    command = shlex.join(["ppbench", "report", *names])
    check_not_index(path, reports)
    write_report(path, store, runs, title=title, command=command, sweep_text=_sweep_text(runs))
    if path.parent.resolve() == reports.resolve():
        update_index(reports, tell)
    return path


def _sweep_text(runs: pd.DataFrame) -> str | None:
    """The sweep file, if all runs come from one and it can still be read."""
    files = runs["sweep_file"].dropna().unique()
    if len(files) != 1:
        return None
    try:
        return Path(files[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True)
class Shown:
    """What of the runs a timeline shows: `choice` of the step, and whether with its plan."""

    names: Sequence[str]
    choice: str
    has_plan: bool


def timeline(shown: Shown, output: Path | None, results: Path, reports: Path) -> Path:
    """Write the timelines of runs on one time axis; returns the page's path."""
    store = open_store(results)
    runs = store.named(shown.names)
    path = output or reports / f"timeline-{_name_of(shown, runs)}.html"
    check_not_index(path, reports)
    write_timeline(path, store, runs, choice=shown.choice, has_plan=shown.has_plan)
    if path.parent.resolve() == reports.resolve():
        update_index(reports, tell)
    return path


def timeline_text(shown: Shown, results: Path) -> str:
    """The timelines of runs, drawn for the terminal."""
    store = open_store(results)
    runs = store.named(shown.names)
    rows, names = [run for _, run in runs.iterrows()], run_names(runs)
    steps = steps_of(store, rows, names, choice=shown.choice, has_plan=shown.has_plan)
    return draw_steps(steps, Console())


def _name_of(shown: Shown, runs: pd.DataFrame) -> str:
    """The run's id, and a hash of what else is chosen, where it is more than that."""
    ids = [str(run_id) for run_id in runs["run_id"]]
    if len(ids) == 1 and shown.choice == MEDIAN and not shown.has_plan:
        return ids[0]
    chosen = json.dumps([ids, shown.choice, shown.has_plan])
    return f"{ids[0]}-{hashlib.sha256(chosen.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class OverheadOutcome:
    """What `ppbench overhead` prints and returns."""

    table: str
    exit_code: int


def overhead(file: Path, overrides: Sequence[str], num_rounds: int, how: Format) -> OverheadOutcome:
    """What measuring costs in every case of a sweep.

    When the ranks die, the cases that are finished are reported all the same. Raises LaunchError
    when none is.
    """
    read, console = read_sweep(file, overrides, default_device()), Console(stderr=True)
    finished: list[Rounds] = []
    exit_code = 0
    with console.status("starting the ranks") as status:
        show = functools.partial(_show_round, console, status, num_rounds)
        try:
            measure_overhead(read, num_rounds, show, finished.append)
        except LaunchError as error:
            if not finished:
                raise
            tell(f"error: {error}")
            exit_code = EXIT_FAILED_RUNS
    frame = pd.DataFrame([rounds.row() for rounds in finished])
    table = render(frame, how, [*(read.axes or WORKLOAD), *RATIO_COLUMNS])
    return OverheadOutcome(table, exit_code)


def _show_round(
    console: Console, status: Status, num_rounds: int, place: str, num_done: int
) -> None:
    """A live line on a terminal, a line for each case elsewhere."""
    status.update(f"{place}, {num_done} of {num_rounds} rounds")
    if not console.is_terminal and num_done == 0:
        tell(place)


@dataclass(frozen=True)
class CheckOutcome:
    """What `ppbench models check` prints and returns."""

    table: str
    verdict: str
    exit_code: int


def check_models(names: Sequence[str], how: Format) -> CheckOutcome:
    """Train each architecture split over two ranks and unsplit, and compare."""
    console = Console(stderr=True)
    with console.status("starting the ranks") as status:
        checks = check_architectures(names, functools.partial(_show_check, console, status))
    frame = pd.DataFrame([dataclasses.asdict(check) for check in checks])
    num_exact = sum(check.status == "exact" for check in checks)
    verdict = f"{num_exact} of {len(checks)} exact"
    exit_code = EXIT_NOT_EXACT if any(check.has_failed for check in checks) else 0
    return CheckOutcome(render(frame, how, CHECK_COLUMNS), verdict, exit_code)


def _show_check(console: Console, status: Status, progress: CheckProgress) -> None:
    """A live line on a terminal, a line for each architecture elsewhere."""
    status.update(progress.text)
    if not console.is_terminal:
        tell(progress.text)


def environment(how: Format) -> str:
    """The machine's facts, and the fingerprint of its default device with one thread per rank."""
    found = read_environment()
    device = default_device()
    data: dict[str, object] = {
        **dataclasses.asdict(found),
        "default_device": device,
        "fingerprint": found.fingerprint(device, world_size=1, threads_per_rank=1),
    }
    return facts(data, how)
