"""Mistakes in sweep files that need a folder, or a file too long to record.

All others are recorded: `recorded/errors/sweep-files.txt`, `sweep-settings.txt`, `conditions.txt`.
Values alone are in `test_kinds.py`; files that were broken at random in `test_fuzzed_sweeps.py`.
"""

import pytest
from sweep_files import assert_refused, read

from ppbench.errors import SweepFileError


@pytest.mark.parametrize("kind", ["text", "files"])
def test_a_folder_without_a_file_is_said_to_be_there(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden.txt").write_text("text")
    with pytest.raises(SweepFileError) as error:
        read(tmp_path, f'[data]\nsource = "{kind}:{tmp_path}/empty"')
    assert f":2: data.source: no file in the folder: {tmp_path}/empty (" in str(error.value)


def test_a_grid_that_is_too_large_is_refused_without_expanding_it(tmp_path):
    axis = list(range(1, 400))
    text = f"[grid]\nnum_microbatches = {axis}\nseq_len = {axis}\nworld_size = {axis}"
    assert_refused(tmp_path, text, "1: grid", "63,521,199 cases; at most 100,000")
