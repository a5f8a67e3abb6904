"""What pip gets: both wheels and the sdist are built, installed and used in an empty folder."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from samples import sampled

import ppbench
from engine import packages
from ppbench.__main__ import main as start
from ppbench.errors import UsageError
from ppbench.run.machine import environment as environment_here
from ppbench.runtimes import check_can_train
from ppbench.store import Store

ROOT = Path(__file__).parents[1]
READER = ROOT / "packaging" / "reader"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAINS = {"safetensors", "torch", "transformers"}
"""What the reader does without."""


def name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return build("wheel", READER, tmp_path_factory.mktemp("reader"))


def environment(folder: Path, wheel: Path, *without: str) -> Path:
    """A fresh environment with the wheel; its dependencies are those of this one, without some.

    It says that a package is not installed as an interpreter does that lacks it.
    """
    venv.create(folder)
    (packages_folder,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as unpacked:
        unpacked.extractall(packages_folder)
    others = next(path for path in site.getsitepackages() if Path(path, "pandas").is_dir())
    (packages_folder / "others.pth").write_text(f"{others}\n")
    (packages_folder / "sitecustomize.py").write_text(
        "import sys, importlib.machinery as machinery\n"
        "find = machinery.PathFinder.find_spec\n"
        f"lacks = {set(without)}\n"
        "machinery.PathFinder.find_spec = staticmethod(\n"
        "    lambda name, *rest: None if name.split('.')[0] in lacks else find(name, *rest)\n"
        ")\n"
    )
    return folder / "bin" / "python"


PROGRAM = "from ppbench.__main__ import main; main()"
ONE_BY_ONE = """
import contextlib, io, json, sys
from ppbench.__main__ import main
commands, told = json.loads(sys.argv[1]), []
for words in commands:
    sys.argv = ["ppbench", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as e:
        try:
            main()
        except SystemExit as end:
            told.append((end.code, e.getvalue()))
print(json.dumps(told))
"""


def run(python: Path, folder: Path, *words: str, program: str = PROGRAM) -> CompletedProcess[str]:
    """Run `ppbench` of an environment in a folder, where nothing of the checkout is found."""
    command = [str(python), "-P", "-c", program, *words]
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_the_wheel_sweeps_and_reports_in_an_empty_folder(wheel, tmp_path):
    python = environment(tmp_path / "environment", wheel)
    folder = tmp_path / "empty"
    folder.mkdir()
    swept = run(python, folder, "sweep", "quick")
    assert swept.returncode == 0, swept.stderr
    (report,) = (folder / "reports").glob("quick-*.html")
    assert report.stat().st_size > 100_000
    assert set(Store(folder / "results").runs()["schedule"]) == {"1f1b", "afab"}


def test_the_reader_reads_and_reports_without_torch_and_says_what_measuring_needs(
    reader, tmp_path, small_store
):
    python = environment(tmp_path / "environment", reader, *TRAINS, "numba", "pynvml")
    reading = [
        ["--help"], ["ls"], ["show", "last"], ["explain", "last"], ["report", "-o", "page.html"],
        ["compare", "--across", "schedule"], ["query", "select count(*) from runs"],
        ["simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8"],
    ]  # fmt: skip
    measuring = [["sweep", "quick"], ["plan", "quick"], ["models", "check"]]
    done = run(python, small_store, json.dumps([*reading, *measuring]), program=ONE_BY_ONE)
    told = json.loads(done.stdout)
    for words, (code, errors) in zip(reading, told, strict=False):
        assert code in (0, 3), (words, errors)
    needs = "error: training needs the package torch; install it with: pip install ppbench-torch\n"
    assert told[len(reading) :] == [[2, needs]] * len(measuring)


@pytest.fixture
def small_store(tmp_path):
    """A copy of the recorded store."""
    import shutil

    folder = tmp_path / "recorded"
    shutil.copytree(ROOT / "tests" / "ppbench" / "recorded" / "store", folder)
    return folder


def test_both_wheels_have_all_that_is_not_python_and_the_types(wheel, reader):
    tracked = {
        str(path.relative_to(ROOT))
        for room in ("engine", "ppbench")
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {f"ppbench/sweeps/{path.name}" for path in (ROOT / "sweeps").glob("*.toml")}
    for built in (wheel, reader):
        names = {name for name in zipfile.ZipFile(built).namelist() if ".dist-info" not in name}
        assert names - {"ppbench/LICENSE"} == tracked
    assert {"engine/py.typed", "ppbench/py.typed"} <= tracked


def test_the_distributions_have_one_version_and_the_reader_only_lacks_what_trains(wheel, reader):
    of_reader = tomllib.loads((READER / "pyproject.toml").read_text())["project"]
    assert set(PROJECT["dependencies"]) - set(of_reader["dependencies"]) == {
        one for one in PROJECT["dependencies"] if name_of(one) in TRAINS
    }
    assert set(of_reader["dependencies"]) < set(PROJECT["dependencies"])
    assert wheel.name == f"ppbench_torch-{ppbench.__version__}-py3-none-any.whl"
    assert reader.name == f"ppbench_reader-{ppbench.__version__}-py3-none-any.whl"


def test_every_extra_that_a_message_names_brings_the_package():
    extras = PROJECT["optional-dependencies"]
    assert PROJECT["name"] == packages.DISTRIBUTION
    for package in ("datasets", "kaleido", "numba", "pynvml", "submitit"):
        (extra,) = re.findall(r"\[(\w+)\]", packages.install_line(package))
        (requirement,) = extras[extra]
        files = importlib.metadata.files(name_of(requirement)) or ()
        assert any(file.parts[0].partition(".")[0] == package for file in files), package
    assert packages.install_line("torch") == "pip install ppbench-torch"


def test_the_sdist_has_what_its_tests_need(tmp_path):
    sdist = build("sdist", ROOT, tmp_path)
    with tarfile.open(sdist) as unpacked:
        names = {name.partition("/")[2] for name in unpacked.getnames()}
    wanted = {"Makefile", "README.md", "constraints.txt", "tests/conftest.py", "sweeps/quick.toml"}
    assert wanted | {"packaging/reader/pyproject.toml", "docs/install.md"} <= names
    assert not any("__pycache__" in name or name.startswith(".venv") for name in names)


def test_a_script_of_three_lines_is_checked_by_mypy_with_our_types(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import ppbench\n"
        'number: int = ppbench.load("results")\n'
        "ppbench.attach(1, range(3), every=100.5)\n"
    )
    command = [sys.executable, "-m", "mypy", str(script)]  # with the cache of `make lint`
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.findall(r"script\.py:(\d): error: \w+", done.stdout) == ["2", "3"], done.stdout


def test_a_system_or_a_torch_that_cannot_train_is_said_first(monkeypatch, capsys):
    check_can_train()
    with monkeypatch.context() as changed:
        changed.setattr(importlib.metadata, "version", lambda _name: "2.8.0+cu128")
        with pytest.raises(UsageError, match=r"^torch 2\.8\.0\+cu128 .* 'torch>=2\.10'$"):
            check_can_train()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match=r"^measuring needs Linux, and this is darwin"):
        check_can_train()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ppbench does not run on Windows; use Linux")


def test_gpus_without_the_package_that_reads_them_are_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(environment_here, "_DRIVER", tmp_path)
    here = dataclasses.replace(environment_here.read_environment(), cuda="12.8")
    monkeypatch.setattr(environment_here, "read_environment", lambda: here)
    assert environment_here.why_gpus_are_not_seen() is None
    monkeypatch.setattr(environment_here, "is_installed", lambda name: name != "pynvml")
    told = environment_here.why_gpus_are_not_seen()
    assert told is not None
    assert told.endswith("install it with: pip install 'ppbench-torch[gpu]'")


@pytest.mark.parametrize("place", sampled(["engine/__init__.py", "engine.py"]))
def test_another_package_engine_is_named_instead_of_failing_somewhere(wheel, tmp_path, place):
    python = environment(tmp_path / "environment", wheel)
    other = tmp_path / "script" / place
    other.parent.mkdir(parents=True)
    other.touch()
    done = run(python, tmp_path / "script", "sweep", "quick")
    assert done.returncode == 2
    assert f"{place}: hides the package engine that came with ppbench" in done.stderr
    found = subprocess.run(
        [str(python), "-c", "import ppbench"],
        cwd=tmp_path / "script", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"ImportError: engine: Python finds {other}" in found.stderr
