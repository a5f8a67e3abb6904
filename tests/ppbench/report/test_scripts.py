"""The plotting library: as its package has it, and one copy for the pages that share it."""

from __future__ import annotations

from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from ppbench.display.formats import Assets
from ppbench.errors import UsageError
from ppbench.report.pages.report import report_runs
from ppbench.report.pages.timeline import timeline_of_runs
from ppbench.report.scripts import library, shared_name
from ppbench.store import Store

MOST_BYTES = 500_000


def test_the_library_is_plotlys_own() -> None:
    assert library() == get_plotlyjs()


def test_pages_share_one_library_and_are_small(demo: Store, tmp_path: Path) -> None:
    report = report_runs(demo, list(demo.runs()["run_id"]), None, tmp_path, Assets.shared)
    run_id = str(demo.runs().query("status == 'ok'").iloc[0]["run_id"])
    line = timeline_of_runs(demo, [run_id], None, tmp_path, assets=Assets.shared)
    for page, has_charts in ((report, True), (line, False)):
        text = page.read_text(encoding="utf-8")
        assert page.stat().st_size < MOST_BYTES
        assert text.count(f'<script src="{shared_name()}">') == has_charts
        assert library() not in text
        assert ("is missing beside this page" in text) == has_charts
    assert [path.name for path in (tmp_path / "assets").iterdir()] == [Path(shared_name()).name]
    assert (tmp_path / shared_name()).read_text(encoding="utf-8") == library()


def test_a_page_that_is_printed_has_nothing_beside_it(demo: Store) -> None:
    with pytest.raises(UsageError, match=r"/dev/stdout: not a file in a folder.*--assets shared"):
        report_runs(demo, [], Path("/dev/stdout"), Path("reports"), Assets.shared)
