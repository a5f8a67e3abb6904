"""The promises of the pages: their code runs, what they name exists, nothing is left out.

They are short, and so are their sentences: words are counted here. A word has a letter or a digit.
"""

import ast
import re
import shlex
import statistics
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from command import python

import ppbench
from ppbench.cli.app import app
from ppbench.config.case import CASE_KEYS, SETTINGS
from ppbench.config.reader import read_sweep
from ppbench.errors import PpbenchError
from ppbench.store import SCHEMA_VERSION

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TRAIN = (ROOT / "docs" / "howto" / "train.md").read_text()
SWEEP_FILE = (ROOT / "docs" / "reference" / "sweep-file.md").read_text()
ENGINE = (ROOT / "docs" / "reference" / "engine.md").read_text()
NOTEBOOK = (ROOT / "docs" / "reference" / "python.md").read_text()
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
)
MOST_WORDS = {"README.md": 450, "CONTRIBUTING.md": 1500, "docs": 22_000}
MOST_WORDS_OF_A_SENTENCE = 16
"""In the mean over a page's prose; code, tables and headings are none."""
SECTIONS = (
    *("model", "data", "train", "measure", "launch", "transfer", "sharding", "slices"),
    "emulated",
)
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
NO_PROSE = re.compile(r"^(?:\||#|!\[|<!--|    |Made from the code:).*$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
SOURCE = re.compile(r"`((?:engine|ppbench|tests|benchmarks|docs|sweeps)/[\w/.-]*)`")
NAMES_IN = re.compile(r"`([\w/]+\.py)`: (`[A-Za-z_]\w*(?:\.\w+)?`(?:, `[A-Za-z_]\w*(?:\.\w+)?`)*)")
FOLDERS = ("ppbench", "engine", "benchmarks", "tests", "docs")


def block(page, language):
    return re.search(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)[1]


def num_words(text):
    return sum(1 for word in text.split() if re.search(r"\w", word))


def sentences(page):
    """The sentences of the prose; each item of a list is one of its own, and so is a paragraph."""
    prose = re.sub(r"\]\([^)]*\)", "]", NO_PROSE.sub("\n", FENCE.sub("\n", page)))
    for paragraph in re.split(r"\n\s*\n|\n *(?:-|\d\.) ", prose):
        for sentence in re.split(r"(?<=[.!?])[*)»\"]*\s+", paragraph):
            if num_words(sentence) > 1:
                yield sentence


def test_the_pages_are_short():
    docs = "".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
    for name, most in MOST_WORDS.items():
        text = docs if name == "docs" else (ROOT / name).read_text()
        assert num_words(text) <= most, name


@pytest.mark.parametrize("page", PAGES)
def test_the_sentences_of_a_page_are_short(page):
    lengths = [num_words(sentence) for sentence in sentences((ROOT / page).read_text())]
    assert statistics.fmean(lengths or [0]) <= MOST_WORDS_OF_A_SENTENCE


def test_sentences_are_counted_without_code_and_tables():
    page = (
        "# A title\n\nOne two. Three, [four](five six)\nfive? (Six.)\n\n- seven eight\n- nine ten\n"
    )
    page += "| a | table |\n```sh\nsome code\n```\n"
    assert [num_words(each) for each in sentences(page)] == [2, 3, 2, 2]


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


def test_every_command_is_used_on_a_page():
    text = "".join((ROOT / page).read_text() for page in PAGES)
    for name in typer.main.get_command(app).commands:
        assert f"ppbench {name}" in text, name


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_a_sentence_are_commands_with_their_options(page):
    """Those in blocks of code are run by tests/ppbench/test_pages.py."""
    text = FENCE.sub("", (ROOT / page).read_text())
    for line in re.findall(r"`ppbench ([a-z][^`\n]*)`", text):
        words = shlex.split(line)
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            assert words, line
            if not words[0].islower():
                break
            command = command.commands[words.pop(0)]
            if not words and hasattr(command, "commands"):
                break
        known = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        options = {word.partition("=")[0] for word in words if re.match(r"-{1,2}[a-z]", word)}
        assert options <= {*known, "--help"}, line


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_names_is_one_of_a_sweep_file(page):
    text = (ROOT / page).read_text()
    keys = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z]\w*)(?: [=<>][^`]*)?`", text))
    files = {key for key in keys if key.endswith((".py", ".toml"))}
    assert keys - files - SETTINGS.keys() == set()


def test_every_key_that_the_reference_prints_is_read(tmp_path):
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    import reference

    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n')
    printed = re.findall(r"^\| `([\w.]+)` \|.*?\| `([^`]*)` \|", reference.settings(), re.MULTILINE)
    assert len(printed) > 60
    for key, default in printed:
        said = ""
        try:
            read_sweep(file, [f"{key}={default}"], "cpu")
        except PpbenchError as error:  # other settings may be missing that it belongs to
            said = str(error)
        assert "unknown key" not in said, key


@pytest.mark.parametrize("page", PAGES)
def test_every_key_of_a_sweep_file_that_a_page_shows_is_read(page, tmp_path):
    for shown in re.findall(
        r"^```toml\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    ):
        if re.search(r"^(?:\[\[setting\]\]|F_ms)", shown, re.MULTILINE):
            continue  # costs, which are no sweep file
        file = tmp_path / "shown.toml"
        file.write_text(shown if "name =" in shown else f'name = "shown"\n{shown}')
        said = ""
        try:
            read_sweep(file, [], "cpu")
        except PpbenchError as error:  # a part of a file, of a model that is not here
            said = str(error)
        assert "unknown key" not in said, shown


@pytest.mark.parametrize("page", PAGES)
def test_every_anchor_that_a_page_links_exists(page):
    for path, anchor in LINK.findall((ROOT / page).read_text()):
        target = (ROOT / page).parent / path if path else ROOT / page
        headings = re.findall(r"^#+ (.*)$", FENCE.sub("", target.read_text()), re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
        made = "<!-- made: settings -->" in target.read_text() and anchor == "every-key"
        assert anchor in slugs or made, f"{path}#{anchor}: known are {slugs}"


def test_the_page_on_the_library_runs(tmp_path):
    (tmp_path / "example.py").write_text(block(NOTEBOOK, "python"))
    done = python("example.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Prediction(1f1b: 2 ranks, 4 microbatches; makespan 15 s, bubble 20.0%)" in done.stdout
    assert "stage imbalance" in done.stdout


def test_the_page_on_the_engine_runs(capsys):
    for code in re.findall(r"```python\n(.*?)```", ENGINE, re.DOTALL):
        exec(code, {})
    slow_head, equal = map(int, capsys.readouterr().out.split()[:2])
    assert slow_head == 10 + 2 + 8 * (14 + 14 + 12)  # the head waits for the first F alone
    assert equal == 8 * (10 + 10 + 8) + (10 + 10 - 8)  # W fills a part of the drain


def test_the_page_on_the_library_names_every_function():
    for name in ppbench.__all__:
        assert name == "__version__" or f"ppbench.{name}" in NOTEBOOK, name


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


def test_every_variable_that_the_code_reads_is_on_its_page():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    sources = [path for room in ("engine", "ppbench") for path in (ROOT / room).rglob("*.py")]
    read = {
        name
        for path in sources
        for name in re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', path.read_text())
    }
    assert len(read) > 6
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_every_page_that_the_code_names_exists():
    sources = [path for room in ("engine", "ppbench") for path in (ROOT / room).rglob("*.py")]
    named = {
        name
        for path in sources
        for name in re.findall(r"docs/\w+/[\w-]+\.md", path.read_text())
        if "http" not in name
    }
    assert len(named) > 3
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_each_test_file_has_a_name_of_its_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]  # pytest imports by these
    assert sorted(set(names)) == sorted(names)


def test_every_module_that_a_page_calls_by_its_last_name_exists():
    modules = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    text = "".join((ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md"))
    named = {path.rpartition("/")[2] for path in re.findall(r"`([\w/]+\.py)`", text)}
    assert named - modules - {"NAME.py"} == set()


@pytest.mark.parametrize("package", ["engine", "ppbench"])
def test_every_room_of_the_code_is_on_the_map(package):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    folders = [path for path in (ROOT / package).rglob("*") if path.is_dir()]
    rooms = [path for path in folders if any(path.glob("*.py")) or any(path.glob("*.html"))]
    assert len(rooms) > 4
    for room in rooms:
        assert f"`{room.relative_to(ROOT)}/`" in page, room


def test_the_map_of_the_code_names_functions_where_they_are():
    places = NAMES_IN.findall((ROOT / "CONTRIBUTING.md").read_text())
    for path, names in places:
        tree = ast.parse((ROOT / path).read_text())
        defined = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for name in re.findall(r"\w+", names):
            assert name in defined, f"{path}: {name}"
