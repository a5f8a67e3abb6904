"""Claims: written, read back strictly, checked again, replicated."""

from __future__ import annotations

import json
import random
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from command import Printed, printed
from measured import FAILS, TWO_CASES, add_measured, around, sweep_in
from repositories import commits, make_repository

from ppbench.commits import claim_check
from ppbench.commits.claim_file import VERSION, content_of, read_claim, write_claim
from ppbench.commits.claims import Claim, replications_of
from ppbench.errors import ExitCode, LaunchError, NotMeasuredError, UsageError
from ppbench.run.machine.measuring_code import code_hash
from ppbench.statistics.replication import Outcome
from ppbench.store import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

DAY_1, DAY_2 = "2026-01-01T09:00:00+00:00", "2026-01-02T09:00:00+00:00"
FILE = Path("claim.json")


@pytest.fixture
def shas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two commits of a repository with a sweep file; we are in it."""
    folder = make_repository(tmp_path / "repository")
    made = commits(folder, 2)
    sweep_in(folder)
    monkeypatch.chdir(folder)
    return made


def measure(shas: list[str], base: list[float], head: list[float], at: str, **changes) -> None:
    for sha, speeds in zip(shas, (base, head), strict=True):
        facts = {"created_at": at, "code": code_hash(), **changes}
        add_measured(Path("sweep.toml"), sha, speeds, **facts)


def now() -> str:
    return datetime.now(UTC).isoformat()


def compared(shas: list[str], *options: str) -> Printed:
    return printed("compare", *shas, "sweep.toml", "--metric", "tokens_per_s", *options)


@pytest.fixture
def claim(shas: list[str]) -> Claim:
    """The claim that the second commit is slower by 5 %, in `claim.json`."""
    measure(shas, around(1000.0, 5), around(950.0, 5), DAY_1)
    assert compared(shas, "--claim", str(FILE)).exit_code == 0
    return read_claim(FILE)


def checked(*options: str) -> Printed:
    return printed("check", FILE, *options)


def test_a_claim_states_what_was_compared_and_all_it_rests_on(claim, shas):
    assert [claim.base.commit, claim.head.commit] == shas
    assert (claim.head.subject, claim.head.is_dirty) == ("Number 2", False)
    assert claim.head.code == (code_hash(),)
    assert claim.machines[0].facts["num_cores"] == 2
    (case,) = claim.cases
    assert (case.settings["schedule"], case.measure["measure_steps"]) == ("1f1b", 10)
    assert [launch.side for launch in claim.launches] == ["base"] * 5 + ["head"] * 5
    assert {launch.ended_at for launch in claim.launches} == {DAY_1}
    assert {launch.session for launch in claim.launches} == {0}
    assert [launch.figures["tokens_per_s"] for launch in claim.launches[:5]] == around(1000.0, 5)
    (effect,) = claim.effects
    assert effect.change.low < effect.change.estimate < effect.change.high < 0.96
    assert 0.005 < effect.detectable < 0.02
    assert [one.session for one in effect.sessions] == [0]
    sides = f"{shas[0]} {shas[1]}"
    assert claim.command == (
        f"ppbench compare {sides} sweep.toml --metric tokens_per_s --run --launches 5"
    )


def test_failed_launches_are_among_those_of_a_claim(shas):
    measure(shas, [*around(1000.0, 4), None], around(950.0, 5), DAY_1)
    compared(shas, "--claim", str(FILE))
    statuses = [launch.status for launch in read_claim(FILE).launches]
    assert statuses.count("error") == 1
    assert len(statuses) == 10


def test_cautions_and_uncommitted_changes_are_stated(shas):
    measure(shas, around(1000.0), around(950.0), DAY_1, cautions="busy_machine,throttled")
    compared(shas, "--claim", str(FILE))
    assert read_claim(FILE).launches[0].cautions == ("busy_machine", "throttled")


def test_what_is_written_is_read_back(claim, tmp_path):
    again = tmp_path / "again.json"
    write_claim(claim, again)
    assert read_claim(again) == claim
    assert again.read_text() == FILE.read_text()
    content = json.loads(FILE.read_text())
    again.write_text(json.dumps(content))  # without indents it is the same claim
    assert read_claim(again) == claim
    assert list(content) == list(content_of(claim))


def edited(change) -> None:
    content = json.loads(FILE.read_text())
    change(content)
    FILE.write_text(json.dumps(content))


def _estimate(content) -> None:
    content["effects"][0]["change"]["estimate"] = 0.9


def _figure(content) -> None:
    content["launches"][3]["figures"]["tokens_per_s"] += 1


DAMAGE = {
    "an edited estimate": (_estimate, "claim.json: effects: was edited or damaged"),
    "an edited figure": (_figure, "claim.json: launches: was edited or damaged"),
    "another time": (lambda c: c["launches"][0].update(ended_at=DAY_2), "launches: was edited"),
    "a part less": (lambda c: c.pop("machines"), "machines: was edited or damaged"),
    "a part more": (lambda c: c.update(more=1), "more: was edited or damaged"),
    "no checksums": (lambda c: c.pop("checksums"), "checksums: are missing"),
    "another format": (lambda c: c.update(format="claims"), 'format: is "claims"; expected "ppb'),
    "a later version": (lambda c: c.update(version=VERSION + 1), "version: is 2; expected 1"),
    "no version": (lambda c: c.pop("version"), "version: is missing; expected 1"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_an_edited_claim_is_refused_with_the_part_that_was_edited(claim, what):
    change, message = DAMAGE[what]
    edited(change)
    with pytest.raises(UsageError) as raised:
        read_claim(FILE)
    assert message in str(raised.value)
    assert "write it again with: ppbench compare" in str(raised.value)
    assert raised.value.exit_code == ExitCode.usage


WRONG = {
    "a case that is not there": (lambda c: c["effects"][0].update(case=7), "effects.0.case"),
    "no figure": (lambda c: c["effects"][0].update(metric="speed"), "effects.0.metric"),
    "no verdict": (lambda c: c["effects"][0]["change"].update(verdict="fast"), "effects.0.change"),
    "text for a number": (lambda c: c["launches"][0].update(launch="0"), "launches.0.launch"),
    "a field more": (lambda c: c["launches"][0].update(extra=1), "launches.0.extra"),
    "a field less": (lambda c: c["head"].pop("commit"), "head.commit"),
    "no time": (lambda c: c["launches"][0].update(ended_at="noon"), "launches.0.ended_at"),
    "no session": (lambda c: c["launches"][0].update(session=9), "launches.0.session"),
    "ends in disorder": (lambda c: c["effects"][0]["change"].update(low=2.0), "effects.0.change"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_claim_has_is_named_though_its_checksum_fits(claim, what):
    from ppbench.commits.claim_file import _checksum

    change, place = WRONG[what]

    def change_and_sign(content) -> None:
        change(content)
        content["checksums"] = {
            name: _checksum(value) for name, value in content.items() if name != "checksums"
        }

    edited(change_and_sign)
    with pytest.raises(UsageError, match=rf"claim\.json: {place}"):
        read_claim(FILE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not whole JSON"),
        (b"[]", "is JSON, but not an object"),
        (b"\xff\xfe", "is not whole JSON"),
        (b'{"format": "ppbench claim", "version": NaN}', "NaN is no number of JSON"),
        (b'{"format": 1, "format": "ppbench claim"}', 'the key "format" stands twice'),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not whole JSON"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path, data, message):
    file = tmp_path / "claim.json"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read_claim(file)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file; expected a claim"):
        read_claim(tmp_path / "none.json")
    with pytest.raises(UsageError, match="is no file; expected a claim"):
        read_claim(tmp_path)


def _mutated(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with one place changed, removed, doubled, or cut off."""
    at = chance.randrange(len(data))
    until = at + chance.randint(1, 40)
    kind = chance.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[until:]
    if kind == 2:
        return data[:until] + data[at:]
    if kind == 3:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    digits = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
    at = chance.choice(digits)
    return data[:at] + str(chance.randrange(10)).encode() + data[at + 1 :]


def test_no_mutation_of_a_claim_is_accepted_as_another_one(claim):
    data, chance, num_refused = FILE.read_bytes(), random.Random(25), 0
    for _ in range(200):
        FILE.write_bytes(_mutated(data, chance))
        try:
            assert read_claim(FILE) == claim  # blanks, or the same digit
        except UsageError as error:
            assert str(error).startswith("claim.json: ")
            assert "\n" not in str(error)
            num_refused += 1
    assert num_refused > 150


def test_a_claim_that_is_seen_again_has_held(claim, shas):
    measure(shas, around(990.0, 5), around(942.0, 5), DAY_2)
    done = checked()
    assert done.exit_code == ExitCode.ok
    assert done.text.startswith("held: tokens/s of 1f1b, ")
    assert ": slower by 4.8 % [" in done.text
    assert "; claimed: slower by 5.0 % [" in done.text
    assert "again    2026-01-02 09:00 to 09:00 UTC: another session" in done.text


def test_a_claim_of_which_nothing_is_seen_again_is_contradicted(claim, shas):
    measure(shas, around(1000.0, 5), around(1001.0, 5), DAY_2)
    done = checked()
    assert done.exit_code == ExitCode.regression
    assert done.text.startswith("contradicted: tokens/s of 1f1b, ")
    assert "not shown: any change is within 1 % (+0.1 % [" in done.text
    values = json.loads(checked("--format", "json").text)
    assert (values["outcome"], values["exit_code"]) == ("contradicted", 1)
    assert values["claims"][0]["claimed_verdict"] == "slower"


@pytest.mark.parametrize(
    ("base", "head"), [([1000.0], [950.0]), ([900.0, 1000.0, 1100.0], [850.0, 990.0, 1100.0])]
)
def test_too_few_or_too_scattered_launches_show_nothing(claim, shas, base, head):
    measure(shas, base, head, DAY_2)
    done = checked()
    assert done.exit_code == ExitCode.insufficient
    assert done.text.startswith("not shown: tokens/s of 1f1b, ")


def test_launches_of_the_claim_are_not_its_own_proof(claim, shas):
    with pytest.raises(NotMeasuredError, match="newer than 2026-01-01 09:00 UTC, the claim's last"):
        checked()


def test_a_case_that_no_longer_runs_leaves_the_claim_open_with_a_code_of_its_own(claim, shas):
    measure(shas, around(1000.0, 5), [None] * 5, DAY_2)
    done = checked()
    assert done.exit_code == ExitCode.failed_runs
    assert "not measured again" in done.text


def test_with_run_both_sides_are_measured_anew(claim, shas):
    measure(shas, around(1000.0, 5), around(950.0, 5), now(), launch=7)
    measure(shas, around(1000.0, 5), around(950.0, 5), now())
    done = checked("--run", "--launches", "5")  # those just made are taken
    assert done.exit_code == ExitCode.ok
    assert len(Store(Path("results")).runs(["run_id"])) == 30


def test_with_run_commits_that_do_not_start_are_failed_runs(claim):
    Path("sweep.toml").write_text(FAILS)
    with pytest.raises(LaunchError, match="does not run"):
        checked("--run", "--launches", "3")


def test_measuring_needs_the_sweep_file_and_the_tree_that_was_claimed(claim):
    Path("sweep.toml").unlink()
    with pytest.raises(
        UsageError, match=r"sweep file .*sweep\.toml is not here; expected it where"
    ):
        checked("--run")


@pytest.mark.parametrize(
    "option",
    ["--base=HEAD", "--head=HEAD", "--threshold=3%", "--summary=a", "--max-launches=9"],
)
def test_options_of_the_gate_are_not_for_claims(claim, option):
    with pytest.raises(UsageError, match="is for the gate; a claim says itself what is compared"):
        checked(option)


def test_options_that_contradict_each_other_are_refused(claim, shas):
    with pytest.raises(UsageError, match="--new-session: says when to replicate"):
        checked("--new-session")
    with pytest.raises(UsageError, match="leave out --run"):
        compared(shas, "--replicate", "--run")
    with pytest.raises(UsageError, match="leave out --max-launches"):
        compared(shas, "--replicate", "--max-launches=9")
    with pytest.raises(UsageError, match=r"unknown file extension; expected \.json or \.md"):
        compared(shas, "--claim", "claim.txt")
    with pytest.raises(UsageError, match="expected the claim in JSON"):
        printed("check", "claim.md")
    with pytest.raises(UsageError, match="name its file, CLAIM"):
        printed("check", "--replicate")
    with pytest.raises(UsageError, match="is about two sides"):
        printed("compare", "--across", "schedule", "--claim", "claim.json")


def test_a_session_that_goes_on_is_waited_for_or_ended_on_purpose(shas, monkeypatch):
    at = datetime.now(UTC) - timedelta(minutes=5)
    measure(shas, around(1000.0, 5), around(950.0, 5), at.isoformat())
    with pytest.raises(NotMeasuredError) as raised:
        compared(shas, "--replicate")
    assert f"replicate it after {at + timedelta(hours=4):%Y-%m-%d %H:%M} UTC" in str(raised.value)
    assert "begin another session now with --new-session" in str(raised.value)
    _measures(shas, monkeypatch, around(1000.0, 5), around(948.0, 5))
    done = compared(shas, "--replicate", "--new-session", "--claim", str(FILE))
    assert done.exit_code == ExitCode.ok
    assert "another session, begun on purpose at" in done.text
    (effect,) = read_claim(FILE).effects
    assert [one.session for one in effect.sessions] == [0, 1]
    assert [outcome for _, outcome, _ in replications_of(effect)] == [Outcome.held]


def _measures(shas, monkeypatch, base, head) -> None:
    """Put launches by hand in place of those that measuring would make."""

    def measured(*_: object) -> tuple[str, str]:
        for sha, speeds in zip(shas, (base, head), strict=True):
            add_later(sha, speeds, now())
        return shas[0], shas[1]

    monkeypatch.setattr(claim_check, "measure_sides", measured)


def test_a_comparison_is_replicated_in_another_session(shas, monkeypatch):
    measure(shas, around(1000.0, 5), around(950.0, 5), DAY_1)
    for head, code, word in ((951.0, 0, "held"), (1000.0, 1, "contradicted")):
        _measures(shas, monkeypatch, around(1000.0, 5), around(head, 5))
        done = compared(shas, "--replicate", "--new-session")
        assert (done.exit_code, done.text.split(":")[0]) == (code, word)
        Path("results").rename(f"results-{word}")
        measure(shas, around(1000.0, 5), around(950.0, 5), DAY_1)


def page_of(shas: list[str]) -> str:
    compared(shas, "--claim", "claim.md")
    return Path("claim.md").read_text()


def test_the_page_says_the_verdict_first_and_how_to_repeat_it_last(shas):
    measure(shas, around(1000.0, 5), around(950.0, 5), DAY_1)
    page = page_of(shas)
    first = page.splitlines()[0]
    assert first.startswith("**tokens/s of 1f1b, ")
    assert ": slower by 5.0 % [4.8, 5.2]; rests on one session**" in first
    assert f"- head `{shas[1]} Number 2`" in page
    assert page.count("| head | 2026") == 5
    assert "<details><summary>10 launches, machine and settings</summary>" in page
    assert page.rstrip().endswith("--metric tokens_per_s --run --launches 5\n```")
    assert "hostname" not in page


def test_twenty_paired_steps_of_one_launch_a_side_show_nothing(shas):
    """pytorch#196709: «+1.04 %, 20 of 20 paired steps», withdrawn three days later."""
    measure(shas, [1000.0], [1010.4], DAY_1, measure_steps=10)
    first = page_of(shas).splitlines()[0]
    assert (
        "not shown: 1 launch a side, and a verdict takes 3 a side (+1.0 % between them; " in first
    )
    assert "steps of one launch are no replicates)" in first
    assert "faster" not in first


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (around(1001.0, 5), "not shown: any change is within 1 % (+0.1 % ["),
        ([940.0, 1060.0, 1000.0, 980.0, 1010.0], "is not clear of noise; 5 launches a side find "),
        (around(1060.0, 5), ": faster by 6.0 % [5.8, 6.2]"),
    ],
)
def test_only_what_is_clear_of_noise_and_beyond_the_floor_is_a_change(shas, head, words):
    measure(shas, around(1000.0, 5), head, DAY_1)
    assert words in page_of(shas).splitlines()[0]


def test_launches_of_two_sessions_are_told_apart_and_the_later_one_replicates(shas):
    measure(shas, around(1000.0, 3), around(950.0, 3), DAY_1)
    for sha, level in zip(shas, (980.0, 931.0), strict=True):
        add_later(sha, around(level), DAY_2)
    page = page_of(shas)
    assert "held in 2 sessions**" in page.splitlines()[0]
    assert "held in the session of 2026-01-02: slower by" in page.replace("\\", "")
    assert (
        "slower by 5.0 % [4.8, 5.2]" in page.splitlines()[0]
    )  # 2 % between sessions are not in it
    assert "| 990 | 941 |" in page  # medians as they were measured


def add_later(sha: str, speeds: list[float], at: str) -> None:
    """Launches with further numbers, as those that are made anew have."""
    for launch, speed in enumerate(speeds, 7):
        facts = {"created_at": at, "code": code_hash(), "launch": launch}
        add_measured(Path("sweep.toml"), sha, [speed], **facts)


def test_sides_of_different_sessions_have_the_drift_in_their_interval(shas):
    measure(shas, around(1000.0, 5), around(1000.0, 5), DAY_1)
    for day, level in ((3, 1030.0), (5, 970.0), (7, 1010.0)):
        at = f"2026-01-{day:02d}T09:00:00+00:00"
        add_measured(Path("sweep.toml"), shas[0], around(level, 5), created_at=at)
    at = "2026-01-09T09:00:00+00:00"
    add_measured(Path("sweep.toml"), shas[1], around(970.0, 5), created_at=at)
    text = compared(shas).text
    assert "unclear" in text
    assert "the drift between sessions is in their difference and in its interval" in text
    assert "(tokens_per_s 3.1 % in 3 sessions)" in text  # of 1030, 970 and 1010


def test_without_launches_of_one_commit_in_two_sessions_the_drift_is_unknown(shas):
    add_measured(Path("sweep.toml"), shas[0], around(1000.0, 5), created_at=DAY_1)
    add_measured(Path("sweep.toml"), shas[1], around(970.0, 5), created_at=DAY_2)
    text = compared(shas).text
    assert "slower" in text
    assert "the drift between sessions is in their difference, and its size is not known" in text


def test_a_verdict_of_one_session_says_so_in_one_line(shas):
    measure(shas, around(1000.0, 5), around(950.0, 5), DAY_1)
    text = compared(shas).text
    assert text.count("rests on one session, 2026-01-01 09:00 to 09:00 UTC") == 1
    gate = printed("check", "sweep.toml", "--base", shas[0], "--head", shas[1])
    assert gate.text.count("rests on one session") == 1


def test_each_of_several_cases_is_claimed(shas):
    Path("sweep.toml").write_text(TWO_CASES)
    for place, head in ((0, 950.0), (1, 900.0)):
        for sha, level in ((shas[0], 1000.0), (shas[1], head)):
            add_measured(
                *(Path("sweep.toml"), sha, around(level, 5), place), created_at=DAY_1, code="c0de"
            )
    first = page_of(shas).splitlines()[0]
    assert "tokens/s of 1f1b: slower by 5.0 %" in first
    assert "tokens/s of afab: slower by 10.0 %" in first


def test_a_dirty_tree_is_checked_with_exactly_its_changes(shas):
    Path("number").write_text("changed\n")
    changes = subprocess.run(
        ["git", "diff", "--stat"], capture_output=True, text=True, check=True
    ).stdout
    assert changes
    from ppbench.git import Repository

    state = Repository.around(Path.cwd()).state()
    facts = {"created_at": DAY_1, "code": code_hash()}
    add_measured(Path("sweep.toml"), shas[0], around(1000.0, 5), **facts)
    add_measured(
        *(Path("sweep.toml"), shas[1], around(950.0, 5)),
        changes=state.changes, is_dirty=True, **facts,
    )  # fmt: skip
    printed("compare", shas[0], "worktree", "sweep.toml", "--claim", FILE)
    claim = read_claim(FILE)
    assert (claim.head.is_dirty, claim.head.changes) == (True, state.changes)
    assert f" {shas[0]} worktree sweep.toml --run" in claim.command
    Path("number").write_text("changed again\n")
    with pytest.raises(UsageError, match=r"expected .* with the changes .*, which were claimed"):
        checked()


def test_the_page_on_claim_files_names_every_field_and_no_other(claim):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "claims.md").read_text()
    content = content_of(claim)
    effect = {**content["effects"][0], **content["effects"][0]["change"]}
    inner = [content["head"], content["machines"][0], content["cases"][0]]
    inner += [content["sessions"][0], content["launches"][0], effect]
    inner += [{"weight": 1, "reason": "", "session": 0}]
    known = {name for part in (content, *inner) for name in part}
    assert {name for name in known if f"`{name}`" not in page} == set()
    named = set(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE))
    assert {name for cell in named for name in re.findall(r"\w+", cell)} <= known


def test_a_launch_that_does_not_count_is_named_and_in_no_noise(shas):
    measure(shas, around(1000.0, 5), [*around(950.0, 5)[:4], 700.0], DAY_1)
    page = page_of(shas)
    (effect,) = claim_at(shas).effects
    (one,) = effect.discounts
    assert (one.side, one.reason, one.weight) == ("head", "apart", 0.0)
    assert effect.detectable < 0.03
    assert f"launch {one.run_id} of head does not count: it lies far from the" in page
    assert "slower by 5." in page.splitlines()[0]


def claim_at(shas: list[str]) -> Claim:
    compared(shas, "--claim", str(FILE))
    return read_claim(FILE)


def test_what_was_recorded_beside_launches_is_headed_by_its_unit(shas):
    facts = {"reference": "train", "reference_ns": 2_500_000.0}
    measure(shas, around(1000.0, 5), around(950.0, 5), DAY_1, **facts)
    table = [row for row in page_of(shas).splitlines() if row.startswith("|")]
    header = next(row for row in table if row.startswith("| side |")).split(" | ")
    place = header.index("reference (ms)")
    of_launches = [row.split(" | ") for row in table if row.startswith(("| base |", "| head |"))]
    assert [cells[place] for cells in of_launches] == ["2.500"] * 10
