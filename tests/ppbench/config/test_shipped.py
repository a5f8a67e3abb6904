"""The sweeps that ship with ppbench, by name."""

import tomllib
from pathlib import Path

import pytest

from ppbench.config import shipped
from ppbench.config.reader import read_sweep
from ppbench.config.shipped import find_sweep, shipped_sweeps
from ppbench.errors import UsageError

ROOT = Path(__file__).parents[3]


def test_every_sweep_of_the_repository_ships_and_is_found_by_its_name(tmp_path, monkeypatch):
    names = [path.stem for path in sorted((ROOT / "sweeps").glob("*.toml"))]
    assert list(shipped_sweeps()) == names
    monkeypatch.chdir(tmp_path)
    for name in names:
        assert read_sweep(Path(name), [], "cpu").name == name
    monkeypatch.chdir(ROOT)
    assert find_sweep(Path("quick")) == Path("sweeps/quick.toml")


def test_sweeps_inside_an_installed_package_are_found_where_the_wheel_is_told_to_put_them(
    tmp_path, monkeypatch
):
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert built["targets"]["wheel"]["force-include"] == {"sweeps": "ppbench/sweeps"}
    (tmp_path / "site" / "ppbench" / "sweeps").mkdir(parents=True)
    (tmp_path / "site" / "ppbench" / "sweeps" / "mine.toml").touch()
    monkeypatch.setattr(shipped, "files", lambda name: tmp_path / "site" / name)
    assert find_sweep(Path("mine")) == tmp_path / "site" / "ppbench" / "sweeps" / "mine.toml"


def test_a_file_comes_before_a_shipped_sweep_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("memory").mkdir()  # a folder is no sweep file
    assert find_sweep(Path("memory")).name == "memory.toml"
    Path("quick").write_text("world_size = 1")
    assert find_sweep(Path("quick")) == Path("quick")
    assert read_sweep(Path("quick"), [], "cpu").cases[0][0].world_size == 1


@pytest.mark.parametrize(
    ("file", "hint"),
    [("qick", 'mean "quick"?'), ("no/quick.toml", 'mean "quick"?'), ("xyz", "Known: 1f1b")],
)
def test_what_is_not_there_is_suggested_and_listed(tmp_path, monkeypatch, file, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        find_sweep(Path(file))
    assert str(caught.value).startswith(f"{file}: cannot read the sweep file: No such file")
    assert all(word in str(caught.value) for word in (hint, "zero_bubble"))
