"""The README's promises: its code runs, and it leaves no command, preset or key out."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import ppbench
from engine.model.presets import sizes_table
from ppbench.cli.app import app
from ppbench.config.reader import read_sweep
from ppbench.config.schema import known_keys

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(language):
    return re.search(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)[1]


@pytest.mark.usefixtures("warm_starts")
def test_the_library_example_trains(tmp_path):
    (tmp_path / "train.py").write_text(block("python"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_the_library_example_is_short():
    code = [line for line in block("python").splitlines() if line and "import" not in line]
    assert len(code) < 20


def test_the_sweep_file_shown_is_valid_and_names_every_section(tmp_path):
    (tmp_path / "mine.toml").write_text(block("toml"))
    assert len(read_sweep(tmp_path / "mine.toml", [], "cpu").cases) == 12
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    assert sections <= set(tomllib.loads(block("toml")))


def test_every_command_and_preset_is_documented():
    for name in typer.main.get_command(app).commands:
        assert f"`ppbench {name}" in README, name
    assert sizes_table() in README


def test_the_page_on_the_library_runs(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "library.md").read_text()
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    command = [sys.executable, "example.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Prediction(1f1b: 2 ranks, 4 microbatches; makespan 15 s, bubble 20.0%)" in done.stdout
    assert "stage imbalance" in done.stdout


def test_the_page_on_the_library_names_every_function():
    page = (Path(__file__).parents[1] / "docs" / "library.md").read_text()
    for name in ppbench.__all__:
        assert name == "__version__" or f"`ppbench.{name}" in page, name
