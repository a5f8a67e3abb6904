"""The output and the files of every command, compared byte for byte with the recorded ones.

The texts are in `recorded/`. Where a change of them is meant, `--record` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from recordings import (
    RECORD_AGAIN,
    RECORDED,
    difference,
    ppbench,
    script_of,
    transcript,
)
from scenes import OF_THIS_MACHINE, SWEEPS

from ppbench.cli.app import app


def all_commands() -> Iterator[tuple[str, ...]]:
    """Every command and group of them, found in the program itself."""
    found = [((), typer.main.get_command(app))]
    while found:
        words, command = found.pop()
        yield words
        found += [((*words, name), one) for name, one in getattr(command, "commands", {}).items()]


HELP = RECORDED / "help" / "commands.txt"
SCRIPTS = sorted(
    str(path.relative_to(RECORDED).with_suffix("")) for path in RECORDED.glob("*/*.txt")
)


def test_the_help_of_every_command_is_recorded(is_recording: bool) -> None:
    expected = [" ".join((*words, "--help")) for words in sorted(all_commands())]
    if is_recording:
        HELP.write_text("\n".join(f"$ ppbench {words}\n" for words in expected))
    recorded = [one.words for one in script_of(HELP.read_text()).commands]
    assert recorded == expected, f"record the help again: {RECORD_AGAIN}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_printed_and_written_is_what_was_recorded(
    name: str, scene: Callable[[str, Path], Path], tmp_path: Path, is_recording: bool
) -> None:
    path = RECORDED / f"{name}.txt"
    recorded = path.read_bytes().decode()
    script = script_of(recorded)
    assert script.commands
    here = scene(script.scene, tmp_path / "here")
    now = transcript(script, here, is_of_this_machine=script.scene in OF_THIS_MACHINE)
    if is_recording:
        path.write_bytes(now.encode())
    elif now != recorded:
        pytest.fail(difference(name, recorded, now), pytrace=False)


def test_every_sweep_that_is_shipped_is_recorded_with_its_cases() -> None:
    ran = [one.words for one in script_of((RECORDED / "outputs/cases.txt").read_text()).commands]
    for path in SWEEPS.glob("*.toml"):
        assert any(words.startswith(f"sweep {path.name} --dry-run") for words in ran)


def test_every_format_tells_the_recorded_facts_of_a_machine(tmp_path: Path) -> None:
    """Their values are this machine's own."""
    facts = [
        *("hostname", "platform", "python", "cpu", "num_cores", "memory_bytes", "gpus"),
        *("interconnect", "driver", "torch", "cuda", "nccl", "transformers", "rocm"),
        *("device_variables", "refused_variable", "default_device", "fingerprint"),
    ]
    table, as_json, csv, markdown = (
        ppbench(["env", "--format", how], tmp_path).stdout
        for how in ("table", "json", "csv", "markdown")
    )
    assert list(json.loads(as_json)) == facts
    assert csv.splitlines()[0] == "key,value"
    assert [line.partition(",")[0] for line in csv.splitlines()[1:]] == facts
    assert [line.split()[0] for line in table.splitlines() if line[1] != " "] == facts
    assert markdown.splitlines()[:2] == ["| key | value |", "|---|---|"]
    assert [line.split()[1] for line in markdown.splitlines()[2:]] == facts
