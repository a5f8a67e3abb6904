from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command import Printed, printed
from repositories import commit, commits, git, make_repository
from tracked import CASE, STEADY, SWEEP, add_launches, in_one_file, slower

from ppbench.commits.check import check
from ppbench.display.formats import Format
from ppbench.errors import ExitCode, NotMeasuredError, UsageError
from ppbench.git import Repository
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

AFAB = replace(CASE, schedule="afab")


@pytest.fixture(scope="module")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_repository(tmp_path_factory.mktemp("made") / "repository")
    commit(folder, {"demo.toml": SWEEP}, "The sweep")
    commits(folder, 2)
    return folder


@pytest.fixture
def root(_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a sweep file and two commits on main; we are in it."""
    folder = Path(shutil.copytree(_root, tmp_path / "repository"))
    monkeypatch.chdir(folder)
    return folder


def sha_of(root: Path, name: str) -> str:
    return git(root, "rev-parse", name)


def measure(store: Store, root: Path, name: str, figures=STEADY, case=CASE, **changes) -> None:
    add_launches(store, figures, sha_of(root, name), case, **changes)


def checked(store: Store, how: Format = Format.table, sweep=(), metrics=(), **asked) -> Printed:
    options = [word for name, value in asked.items() for word in (f"--{name}", value)]
    options += [word for name in metrics for word in ("--metric", name)]
    files = [sweep] if sweep else []
    in_one_file(store)
    return printed("check", *files, *options, "--results", store.folder, "--format", how.value)


def test_nothing_worse_passes(root, store):
    measure(store, root, "HEAD~1")
    measure(store, root, "HEAD", slower(-0.08), bubble_fraction=0.5, peak_memory_bytes=2**20)
    assert checked(store, metrics=["bubble_fraction"]).exit_code == 1
    page = store.folder / "page.html"  # with a metric that is the same, and no band around zero
    assert checked(store, threshold="0%", output=page).exit_code == 0
    assert 'class="forest"' in page.read_text()
    outcome = checked(store)
    assert outcome.exit_code == 0
    assert outcome.text.startswith(
        "ppbench check: passed: nothing worse than allowed (1 case compared)\n\n"
        f" base   {sha_of(root, 'HEAD~1')[:9]} Number 1, 5 runs\n"
        f" head   worktree = {sha_of(root, 'HEAD')[:9]} Number 2, 5 runs\n"
    )


def test_the_result_of_the_gate_is_data_for_a_script(root, store):
    measure(store, root, "HEAD~1")
    measure(store, root, "HEAD", slower(0.08))
    result = check(threshold=0.05, metrics=["tokens_per_s"], results=store.folder)
    rows = json.loads(checked(store, Format.json).text)["changes"]
    assert list(result.frame) == list(rows[0])
    assert result.exit_code is ExitCode.regression
    assert repr(result) == "<GateResult regression: 1 regressed>"
    assert check(threshold="10%", results=store.folder).exit_code is ExitCode.ok


def test_thresholds_of_the_sweep_file_hold_for_its_cases(root, store):
    track = '[track.thresholds]\ndefault = "9%"\n"schedule=afab" = "3%"\n'
    (root / "demo.toml").write_text(f"{SWEEP}{track}")
    commit(root, {}, "Thresholds")
    for case in (CASE, AFAB):
        measure(store, root, "HEAD~1", case=case)
        measure(store, root, "HEAD", slower(0.05), case, sweep_file="demo.toml")
    for sweep in (Path("demo.toml"), ()):  # that of head's runs is found
        found = json.loads(checked(store, Format.json, sweep=sweep).text)
        wrong = {one["case"]: one["threshold"] for one in found["changes"] if one["is_regression"]}
        assert wrong == {"afab": 0.03}
    # One that is typed stands in for the default, not for what was said of some cases.
    asked = {"sweep": Path("demo.toml"), "threshold": "4%"}
    found = json.loads(checked(store, Format.json, **asked).text)
    wrong = {one["case"]: one["threshold"] for one in found["changes"] if one["is_regression"]}
    assert wrong == {"1f1b": 0.04, "afab": 0.03}


def test_a_threshold_below_the_resolution_finds_less_than_one_percent(root, store):
    measure(store, root, "HEAD~1", [s / 10 + 900 for s in STEADY])
    measure(store, root, "HEAD", [s / 10 + 892 for s in STEADY])
    assert checked(store).exit_code == 0
    assert checked(store, threshold="0.5%").exit_code == 1


def test_an_accepted_regression_is_listed_and_passes_until_the_base_has_it(root, store):
    for name in ("HEAD~1", "HEAD"):
        measure(store, root, name, case=AFAB)
    measure(store, root, "HEAD~1")
    measure(store, root, "HEAD", slower(0.08))
    entry = '[[track.accept]]\ncommit = "HEAD"\nreason = "exact <b>"\nup_to = "9%"\n'
    (root / "intended.toml").write_text(SWEEP + entry)
    outcome = checked(store, sweep=Path("intended.toml"))
    assert outcome.exit_code == 0
    assert "passed: 1 regression accepted" in outcome.text
    assert f"with {sha_of(root, 'HEAD')[:9]}: exact <b>" in outcome.text
    for changed in (entry.replace("9%", "5%"), entry.replace('"HEAD"', '"HEAD~1"')):
        (root / "intended.toml").write_text(SWEEP + changed)
        assert checked(store, sweep=Path("intended.toml")).exit_code == 1
    (root / "intended.toml").write_text(f'{SWEEP}{entry}metric = "tokens"\n')
    with pytest.raises(UsageError, match=r'track\.accept: metric: unknown metric "tokens"; did'):
        checked(store, sweep=Path("intended.toml"))


def test_a_regression_comes_before_a_failure_and_that_before_too_little(root, store):
    other = replace(CASE, world_size=4)
    for case in (CASE, AFAB, other):
        measure(store, root, "HEAD~1", case=case)
    measure(store, root, "HEAD", STEADY[:2], other)
    outcome = checked(store)
    assert outcome.exit_code == 3
    assert "too few launches (5 at base, 2 at head)" in outcome.text
    measure(store, root, "HEAD", [None], AFAB, status="oom", error="too big")
    assert checked(store).exit_code == 4
    measure(store, root, "HEAD", slower(0.08))
    assert checked(store).exit_code == 1


def test_a_case_whose_launches_all_failed_is_one_failed_case(root, store):
    measure(store, root, "HEAD~1")
    measure(store, root, "HEAD", [None] * 5, status="oom", error="too big")
    outcome = checked(store)
    assert outcome.exit_code == 4
    assert "1 case failed at head" in outcome.text
    assert outcome.text.count("failed at head: ") == 1
    assert "oom in 5 launches" in outcome.text


def test_what_is_open_passes_and_is_said(root, store):
    measure(store, root, "HEAD~1", [1000.0, 1100.0, 900.0, 1050.0])
    measure(store, root, "HEAD", [950.0, 1060.0, 880.0, 1000.0])
    outcome = checked(store)
    assert outcome.exit_code == 0
    assert outcome.text.startswith("ppbench check: not decided: 1 metric open (1 case compared)")
    assert "; exits with 0" in outcome.text
    (heading,) = (line for line in outcome.text.splitlines() if line.lstrip().startswith("figure"))
    assert "verdict" in heading


def test_what_was_not_measured_is_measured_by_the_check_itself(root, store):
    measure(store, root, "HEAD~1")
    with pytest.raises(NotMeasuredError) as caught:
        check("demo.toml", results=store.folder)
    again = f"ppbench check demo.toml --run --results {store.folder}"
    assert str(caught.value).endswith(f"; measure it with: {again}")
    measure(store, root, "HEAD", STEADY[:2])
    notes = check("demo.toml", results=store.folder).comparison.notes
    assert any(note.endswith(f"measure more with: {again}") for note in notes)


def test_the_base_is_the_nearest_ancestor_that_was_measured(root, store):
    measure(store, root, "HEAD~2")
    measure(store, root, "HEAD")
    outcome = checked(store)
    assert outcome.exit_code == 0
    told = f"base would be {sha_of(root, 'HEAD~1')[:9]}, which is not measured; "
    assert told in outcome.text
    assert f" base   {sha_of(root, 'HEAD~2')[:9]} The sweep" in outcome.text


def test_on_a_branch_the_base_is_where_it_left_main(root, store):
    git(root, "checkout", "--quiet", "-b", "topic")
    commits(root, 2, first=3)
    git(root, "checkout", "--quiet", "main")
    commits(root, 1, first=9)
    git(root, "checkout", "--quiet", "topic")
    measure(store, root, "HEAD~2")
    measure(store, root, "main")
    measure(store, root, "HEAD")
    assert f" base   {sha_of(root, 'HEAD~2')[:9]} " in checked(store).text


def test_the_page_for_a_pull_request_holds_no_markup_of_others(root, store, tmp_path):
    commit(root, {}, "<script>alert(1)</script> `x` @someone | pipe")
    measure(store, root, "HEAD~1")
    failing = replace(CASE, schedule="afab")
    measure(store, root, "HEAD~1", case=failing)
    measure(store, root, "HEAD", slower(0.08), sweep_file="demo.toml")
    measure(store, root, "HEAD", [None], failing, status="crash", error="<img src=x> @team [a](b)")
    page = tmp_path / "page.md"
    outcome = checked(store, Format.csv, summary=page)
    assert outcome.exit_code == 1
    text = page.read_text()
    assert text.startswith(
        "## ppbench check: regression: 1 metric regressed beyond its threshold; "
    )
    assert "- head: `worktree = " in text
    assert "<script>alert(1)</script> 'x' @someone | pipe, 5 runs, 1 failed`" in text
    (note,) = (line for line in text.splitlines() if "<img" in line)
    assert note.startswith("- `afab: 1 launch failed at head, crash: <img src=x> @team [a](b) (")
    assert note.endswith("`")
    assert note.count("`") == 2
    for part in ("**Why**", "**Notes**", "How to reproduce", "<summary>Is it intended?</summary>"):
        assert part in text, part
    head, base = sha_of(root, "HEAD")[:12], sha_of(root, "HEAD~1")[:12]
    assert f"ppbench check demo.toml --base {base} --head {head} --results {store.folder}" in text


def test_a_case_that_broke_fails_even_if_one_launch_had_failed_at_the_base(root, store):
    measure(store, root, "HEAD~1", case=AFAB)
    measure(store, root, "HEAD", case=AFAB)
    measure(store, root, "HEAD~1", STEADY[:4])
    measure(store, root, "HEAD~1", [None], launch=4, status="crash", error="killed")
    measure(store, root, "HEAD", STEADY[:4])
    measure(store, root, "HEAD", [None], launch=4, status="crash", error="killed")
    assert checked(store).exit_code == 0
    measure(store, root, "HEAD", [None] * 5, status="error", error="ImportError")
    outcome = checked(store)
    assert outcome.exit_code == 4
    assert "failed at head: 1f1b: error" in outcome.text


def test_of_a_sweep_that_is_named_every_case_must_be_judged(root, store):
    def missing() -> tuple[int, list[str]]:
        outcome = checked(store, Format.json, sweep=Path("demo.toml"))
        return outcome.exit_code, json.loads(outcome.text)["missing"]

    measure(store, root, "HEAD~1")
    measure(store, root, "HEAD")
    assert missing() == (3, ["schedule=afab: not measured"])
    measure(store, root, "HEAD", case=AFAB)
    assert missing() == (3, ["afab: not measured at base"])
    measure(store, root, "HEAD~1", [None], AFAB, status="oom", error="too big")
    assert missing() == (3, ["afab: failed at base"])
    measure(store, root, "HEAD~1", case=AFAB, fingerprint="other")
    assert missing() == (3, ["afab: measured on different machines"])
    measure(store, root, "HEAD~1", case=AFAB, measure_steps=1)
    assert missing() == (3, ["afab: measured with different settings"])
    measure(store, root, "HEAD~1", case=AFAB)
    assert missing() == (0, [])


def test_a_case_that_fails_on_both_sides_is_no_worse(root, store):
    for name in ("HEAD~1", "HEAD"):
        measure(store, root, name)
        measure(store, root, name, [None], AFAB, status="oom", error="too big")
    outcome = checked(store, sweep=Path("demo.toml"))
    assert outcome.exit_code == 0
    for side in ("base", "head"):
        assert f"note: afab: 1 launch failed at {side}, oom: too big" in outcome.text


def test_thresholds_of_a_sweep_file_are_never_lost_silently(root, store):
    measure(store, root, "HEAD~1", sweep_file="demo.toml")
    measure(store, root, "HEAD", sweep_file="demo.toml")
    (root / "demo.toml").write_text(f"{SWEEP}typo = 3\n")
    with pytest.raises(UsageError, match=r"demo\.toml:4: grid\.typo"):
        checked(store, base="HEAD~1", head="HEAD")
    (root / "demo.toml").unlink()
    lost = "so no thresholds and accepted changes of a sweep file are used"
    assert (
        f"note: demo.toml not found, {lost}; name one: ppbench check SWEEP"
        in checked(store, base="HEAD~1", head="HEAD").text
    )
    measure(store, root, "HEAD", case=AFAB, sweep_file="other.toml")
    assert (
        f"head's runs come from demo.toml, other.toml, {lost}"
        in checked(store, base="HEAD~1", head="HEAD").text
    )


def test_uncommitted_changes_are_committed_before_they_are_accepted(root, store):
    (root / "number").write_text("changed\n")
    changes = Repository.around(root).state().changes
    measure(store, root, "HEAD")
    measure(store, root, "HEAD", slower(0.08), changes=changes, is_dirty=True)
    text = checked(store, base="HEAD").text
    assert "If this is intended, commit first, then name that commit and put it into" in text
    assert 'commit = "the commit that it came with"' in text


def test_attached_trainings_are_gated_with_default_limits(root, store):
    (root / "train.py").write_text("import ppbench\n")
    attached = {"origin": "attached", "sweep_file": "train.py", "sweep_name": "mine"}
    measure(store, root, "HEAD~1", **attached)
    measure(store, root, "HEAD", slower(0.08), **attached)
    commit(root, {"train.py": "import ppbench\n"}, "The script")
    asked = {"base": "HEAD~2", "head": "HEAD~1"}
    by_script = checked(store, sweep="train.py", **asked)
    assert by_script.exit_code == 1
    assert "1 metric regressed beyond its threshold" in by_script.text
    assert "2 % is allowed" in by_script.text
    for sweep in ((), store.folder):  # the script is known by head's runs
        assert checked(store, sweep=sweep, **asked).text == by_script.text
    assert checked(store, sweep="train.py", base="HEAD~1", head="HEAD~2").exit_code == 0


def test_a_training_without_tokens_is_gated_by_its_step(root, store):
    attached = {"origin": "attached", "sweep_file": "train.py"}
    for name, figures in (("HEAD~1", STEADY), ("HEAD", slower(-0.08))):
        for launch, step_ns in enumerate(figures):
            measure(store, root, name, [None], step_ns=step_ns * 1e6, launch=launch, **attached)
    result = check(base="HEAD~1", head="HEAD", results=store.folder)
    assert [gated.line.metric.name for gated in result.regressions] == ["step_ns"]


def test_what_is_no_gate_of_attached_runs_is_one_error(root, store):
    measure(store, root, "HEAD~1")
    measure(store, root, "HEAD")
    (root / "train.py").write_text("import ppbench\n")
    with pytest.raises(NotMeasuredError, match=r"no run of train\.py was attached; run it there"):
        check("train.py", base="HEAD~1", head="HEAD", results=store.folder)
    with pytest.raises(UsageError, match=r"lost\.py: no such file; give a sweep file"):
        check("lost.py", results=store.folder)
    with pytest.raises(UsageError, match=r"--run: measures a sweep file .*; train\.py is"):
        check("train.py", launches=5, results=store.folder)
