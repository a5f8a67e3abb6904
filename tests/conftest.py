"""Fixtures of all tests: the order of files, and slow imports made once for many processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import hypothesis
import pytest
import warm

from ppbench.console import print_notes

hypothesis.settings.register_profile("sample", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None)
"""Others may keep the cores busy, so no example has a deadline."""

os.environ.pop("COLUMNS", None)  # text for a pipe is as wide as it is, unless a test says so
os.unsetenv("COLUMNS")  # readline, which pytest imports, sets it for processes alone
LONGEST = (
    *("test_exact", "test_real_repository", "test_failures", "test_verification"),
    *("test_contract", "test_nodes", "test_recorded_outputs", "test_documents"),
    *("test_installed", "test_runtimes", "test_alive_together", "test_gate"),
    *("test_report_in_browser", "test_process", "test_train", "test_attach", "test_across"),
    *("test_own_models_in_sweeps", "test_own_batches", "test_timeline_in_browser"),
    *("test_sequence", "test_checkpoints", "test_memory", "test_solver", "test_comparison"),
    *("test_images", "test_bisect", "test_automatic_runs", "test_faults", "test_first_screen"),
    *("test_compaction", "test_layer_costs", "test_not_finite", "test_traces", "test_pages"),
)
"""Files that take longest. Begun last, one would go on alone when all is done."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: what tests start would ignore Ctrl-C too, which some send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

print_notes()  # as a command does: whether a test sees them does not depend on those before it

multiprocessing.set_forkserver_preload(
    [
        "__main__",  # pytest's own, where it is a file: else each process would import it again
        "pytest",  # the modules of the functions that ranks run import it
        "ppbench.store",
        "engine.trainer",
        "engine.model.pretrained",
        "torch._dynamo",  # torch imports it for fake tensors and for the first optimizer
        "torch.export._trace",  # torch imports it, and networkx with it, for the first export
        "transformers.models.llama.modeling_llama",
    ]
)
"""There is one such server in a process: what its first user asks for is all that it imports."""

_OF_SERVER = ("_forkserver_address", "_forkserver_authkey")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The processes of all workers are forks of one server, whose imports take five seconds."""
    forkserver.ensure_running()
    of_server = vars(forkserver._forkserver)
    node.workerinput["forkserver"] = {n: of_server[n] for n in _OF_SERVER if n in of_server}


def pytest_configure(config: pytest.Config) -> None:
    """A worker uses the server of the process that has started it, and ends before that does."""
    hypothesis.settings.load_profile("thorough" if config.getoption("--thorough") else "sample")
    if hasattr(config, "workerinput"):
        server = forkserver._forkserver
        vars(server).update(
            config.workerinput["forkserver"],
            _forkserver_alive_fd=os.open(os.devnull, os.O_WRONLY),  # as if it kept the server alive
            ensure_running=resource_tracker.ensure_running,
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run randomised campaigns with all their examples rather than a sample of them, and "
        "every case of the mechanisms that take long to show",
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="write what commands print and write anew, as what tests/ppbench/recorded has",
    )


@pytest.fixture(scope="session")
def is_thorough(request: pytest.FixtureRequest) -> bool:
    """Whether a randomised campaign runs all its examples rather than a sample."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session")
def is_recording(request: pytest.FixtureRequest) -> bool:
    """Whether outputs are recorded anew rather than compared with what was recorded."""
    return bool(request.config.getoption("--record"))


@pytest.fixture(scope="session")
def _warm_server() -> Iterator[warm.Server]:
    with warm.server() as server:
        yield server


@pytest.fixture(scope="module")
def warm_starts(_warm_server: warm.Server) -> Iterator[None]:
    """Processes that a module starts have what takes long imported (warm.py)."""
    with warm.starts_from(_warm_server):
        yield


@pytest.fixture
def fresh_starts() -> Iterator[None]:
    """Processes that this test starts are fresh, whatever the others of the module do."""
    with warm.starts_from(None):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, and what is for `--thorough` with that alone."""
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    else:
        for item in items:
            item.add_marker(pytest.mark.timeout(2 * 3600))  # a campaign's examples take long
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: imports leave little, and a third of the time went to it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze the objects imported so far, so that no collection visits them."""
    gc.freeze()
