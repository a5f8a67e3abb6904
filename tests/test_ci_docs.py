"""What docs/ci offers: the workflow and the jobs are YAML, and keep what their pages say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from command import python

import ppbench
from engine.packages import DISTRIBUTION
from ppbench.cli.app import app

FOLDER = Path(__file__).parents[1] / "docs" / "ci"
GITHUB = yaml.safe_load((FOLDER / "github-actions.yml").read_text())
GITLAB = yaml.safe_load((FOLDER / "gitlab-ci.yml").read_text())
PAGE = (FOLDER.parent / "howto" / "commits.md").read_text()
STEPS = GITHUB["jobs"]["check"]["steps"]
(STEP,) = (step["run"] for step in STEPS if step.get("name") == "Check")


def uses(action: str) -> dict:
    (step,) = (step for step in STEPS if step.get("uses", "").startswith(f"{action}@"))
    return step


def test_all_of_the_history_is_fetched():
    assert uses("actions/checkout")["with"]["fetch-depth"] == 0
    assert GITLAB["performance"]["variables"]["GIT_DEPTH"] == "0"


def test_the_base_is_that_of_the_event_and_forks_have_no_part():
    (step,) = (step for step in STEPS if step.get("name") == "Check")
    assert "pull_request.base.sha || github.event.before" in step["env"]["BASE"]
    assert '${base:+--base "$base"}' in STEP
    assert "head.repo.full_name == github.repository" in GITHUB["jobs"]["check"]["if"]
    assert "github.ref" in GITHUB["concurrency"]["group"]


def test_results_are_kept_whatever_the_gate_says():
    saved, restored = uses("actions/cache/save"), uses("actions/cache/restore")
    assert saved["if"] == uses("actions/upload-artifact")["if"] == "always()"
    assert saved["with"]["path"] == restored["with"]["path"] == "results"
    assert saved["with"]["key"].startswith(restored["with"]["restore-keys"])
    job = GITLAB["performance"]
    assert job["cache"]["when"] == job["artifacts"]["when"] == "always"
    assert job["cache"]["paths"] == ["results/"]


def test_a_fixed_version_is_installed_under_its_name():
    run = [step["run"] for step in STEPS if "pip install" in step.get("run", "")]
    job = [line for line in GITLAB["performance"]["script"] if "pip install" in line]
    assert run == job
    assert "--index-url https://download.pytorch.org/whl/cpu" in run[0]
    assert run[1] == f"pip install {DISTRIBUTION}=={ppbench.__version__}"


def test_they_check_the_sweep_file_of_the_page():
    (name,) = re.findall("Save this as `([^`]+)` in the repository", PAGE)
    for text in (STEP, GITLAB["performance"]["script"][-1]):
        assert f"ppbench check {name} " in text


def test_the_job_of_kubernetes_starts_a_supervisor_on_each_of_its_nodes():
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yml").read_text())
    (ranks,) = job["spec"]["template"]["spec"]["containers"]
    options = dict(arg[2:].split("=") for arg in ranks["args"] if arg.startswith("--"))
    shown = python(*ranks["command"][1:], "--help", folder=FOLDER).stdout
    of_worker = {"results"}
    assert all(f"--{name} " in shown for name in options.keys() - of_worker)
    assert int(options["nodes"]) == job["spec"]["completions"]
    assert int(options["ranks-per-node"]) == ranks["resources"]["limits"]["nvidia.com/gpu"]
    assert options["rendezvous"].startswith(
        f"{job['metadata']['name']}-0.{service['metadata']['name']}:"
    )


def test_no_page_or_message_installs_by_the_bare_name():
    root = FOLDER.parents[1]
    files = [root / "README.md", *FOLDER.parent.rglob("*.md"), *FOLDER.glob("*.yml")]
    files += [path for room in ("ppbench", "engine") for path in (root / room).rglob("*.py")]
    bare = re.compile(r"pip install ['\"]?ppbench(?!-torch)")
    assert [str(path) for path in files if bare.search(path.read_text())] == []


def test_their_commands_are_those_of_ppbench():
    command = typer.main.get_command(app).commands["check"]
    known = {option for parameter in command.params for option in parameter.opts}
    for text in (STEP, GITLAB["performance"]["script"][-1]):
        (line,) = (line for line in text.splitlines() if "ppbench check " in line)
        words = shlex.split(line)
        assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_step_ends_with_the_codes_of_the_gate_and_shows_its_page(tmp_path, code):
    stand_in = tmp_path / "ppbench"
    stand_in.write_text(f"#!/bin/sh\necho '## a verdict' > performance.md\nexit {code}\n")
    stand_in.chmod(0o755)
    page = tmp_path / "page.md"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", STEP],
        cwd=tmp_path, check=False, env={"PATH": path, "GITHUB_STEP_SUMMARY": str(page)},
    )  # fmt: skip
    assert done.returncode == code
    assert page.read_text() == "## a verdict\n"
