"""The page of the benchmarks is what is made of the results that are kept."""

from benchmarks import BENCHMARKS, page
from benchmarks.outcome import RESULTS, Goal, Outcome, Ratio
from benchmarks.surroundings import read_surroundings

LARGEST_BYTES = 200_000


def test_the_page_is_what_the_results_make():
    assert page.PAGE.read_text("utf-8") == page.page_of(RESULTS), "run: python -m benchmarks.page"


def test_results_are_small_and_belong_to_a_benchmark():
    for file in RESULTS.glob("*.json"):
        assert file.stem in BENCHMARKS
        assert file.stat().st_size < LARGEST_BYTES
        assert Outcome.from_json(file.read_text("utf-8")).as_json() == file.read_text("utf-8")


def test_every_benchmark_is_a_module_that_says_its_command():
    for name in BENCHMARKS:
        title, text = page._docstring(name)
        assert title.endswith((".", "?")), name
        assert f"python -m benchmarks.{name}" in text


def test_a_section_has_ratios_goals_surroundings_and_command(tmp_path):
    name = BENCHMARKS[0]
    ratio = Ratio("ours over theirs", (2.0,) * 6, goal=Goal(at_least=4))
    plain = Ratio("another", (1.5,))
    told = f"python -m benchmarks.{name} --rounds 6"
    outcome = Outcome(name, told, {"rounds": 6}, read_surroundings(), (ratio, plain))
    (tmp_path / f"{name}.json").write_text(outcome.as_json(), encoding="utf-8")
    text = page.page_of(tmp_path)
    assert (
        f"| [{name}](#{name}) | ours over theirs | 2.000 [2.000, 2.000] | ≥ 4 | missed by 50.0% |"
        in text
    )
    assert "| another | 1.500 | 1 | | |" in text
    assert "Of 1 goals: 0 held, 1 missed, 0 not decided." in text
    assert f"`{told}`" in text
    assert outcome.surroundings.cpu in text
