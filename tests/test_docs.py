"""The promises of the pages: their code runs, what they name exists, and nothing is left out."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import typer
from command import python

import ppbench
from ppbench.cli.app import app
from ppbench.config.case import CASE_KEYS
from ppbench.config.reader import read_sweep
from ppbench.store import SCHEMA_VERSION

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TRAIN = (ROOT / "docs" / "howto" / "train.md").read_text()
SWEEP_FILE = (ROOT / "docs" / "reference" / "sweep-file.md").read_text()
SIMULATION = (ROOT / "docs" / "explanation" / "simulation.md").read_text()
NOTEBOOK = (ROOT / "docs" / "howto" / "notebook.md").read_text()
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
)
MOST_WORDS = 1200
SOURCE = re.compile(r"`((?:engine|ppbench|tests|benchmarks|docs|sweeps)/[\w/.-]*)`")
NAMES_IN = re.compile(r"`([\w/]+\.py)`: (`[A-Za-z_]\w*(?:\.\w+)?`(?:, `[A-Za-z_]\w*(?:\.\w+)?`)*)")
FOLDERS = ("ppbench", "engine", "benchmarks", "tests", "docs")


def block(page, language):
    return re.search(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)[1]


def test_the_readme_can_be_read_in_a_few_minutes():
    assert len(README.split()) <= MOST_WORDS


@pytest.mark.usefixtures("warm_starts")
def test_the_library_example_trains(tmp_path):
    program = block(TRAIN, "python")
    assert '"llama-8m"' in program
    smaller = program.replace('"llama-8m"', '"llama-tiny"').replace("seq_len=128", "seq_len=64")
    (tmp_path / "train.py").write_text(smaller)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = python(*launch, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_the_library_example_is_short():
    code = [line for line in block(TRAIN, "python").splitlines() if line and "import" not in line]
    assert len(code) < 20


def test_the_sweep_file_shown_is_valid_and_names_every_section(tmp_path):
    (tmp_path / "mine.toml").write_text(block(SWEEP_FILE, "toml"))
    assert len(read_sweep(tmp_path / "mine.toml", [], "cpu").cases) == 12
    sections = {key.partition(".")[0] for key in CASE_KEYS if "." in key}
    assert sections <= set(tomllib.loads(block(SWEEP_FILE, "toml")))


def test_every_command_is_named_in_the_readme():
    for name in typer.main.get_command(app).commands:
        assert f"`ppbench {name}" in README, name


def test_the_page_on_the_library_runs(tmp_path):
    (tmp_path / "example.py").write_text(block(NOTEBOOK, "python"))
    done = python("example.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Prediction(1f1b: 2 ranks, 4 microbatches; makespan 15 s, bubble 20.0%)" in done.stdout
    assert "stage imbalance" in done.stdout


def test_the_page_on_simulation_runs(capsys):
    exec(block(SIMULATION, "python"), {})
    slow_head, equal = map(int, capsys.readouterr().out.split())
    assert slow_head == 10 + 2 + 8 * (14 + 14 + 12)  # the head waits for the first F alone
    assert equal == 8 * (10 + 10 + 8) + (10 + 10 - 8)  # W fills a part of the drain


def test_the_page_on_the_library_names_every_function():
    for name in ppbench.__all__:
        assert name == "__version__" or f"`ppbench.{name}" in NOTEBOOK, name


def test_the_page_on_the_store_names_the_version_that_is_written():
    page = (ROOT / "results" / "README.md").read_text()
    assert f"`schema-{SCHEMA_VERSION}`" in page


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    missing = [
        path for path in SOURCE.findall(text) if not list(ROOT.glob(path.replace("NAME", "*")))
    ]
    assert missing == []
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_each_test_file_has_a_name_of_its_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]  # pytest imports by these
    assert sorted(set(names)) == sorted(names)


def test_every_module_that_a_page_calls_by_its_last_name_exists():
    modules = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    text = "".join((ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md"))
    named = {path.rpartition("/")[2] for path in re.findall(r"`([\w/]+\.py)`", text)}
    assert named - modules - {"NAME.py"} == set()


def test_the_map_of_the_code_names_functions_where_they_are():
    places = NAMES_IN.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(places) > 5
    for path, names in places:
        tree = ast.parse((ROOT / path).read_text())
        defined = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for name in re.findall(r"\w+", names):
            assert name in defined, f"{path}: {name}"
