"""How nbval runs the book's notebooks wherever pytest is started: strictly, in this Python, 2 minutes for a cell."""
import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.once import share_a_folder

# Set before torch is loaded, here and in kernels. OpenMP's threads otherwise spin while they wait for each other, and
# take the cores from ranks and other workers: on a loaded machine, 15 CPU s for a cell that needs 2.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
pytest_plugins = ["tests.suite"]
CELL_TIMEOUT_S = 120.0
NBVAL_DEFAULT_TIMEOUT_S = 2000.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the weekly run."""
    parser.addoption("--fresh-kernels", action="store_true", help="start each notebook's kernel as JupyterLab does")


def pytest_configure(config: pytest.Config) -> None:
    """Fill in the nbval options that were not given on the command line."""
    share_a_folder(config)
    option = config.option
    if not getattr(option, "nbval", False):
        return
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(Path(__file__).with_name("nbval_sanitize.cfg"))
    # The kernel named in a notebook may be another environment's; the book is tested with the Python that runs pytest.
    option.nbval_current_env = option.nbval_current_env or not option.nbval_kernel_name
    if option.nbval_cell_timeout == NBVAL_DEFAULT_TIMEOUT_S:
        option.nbval_cell_timeout = CELL_TIMEOUT_S
    if os.name == "posix":
        from tests.kernels import use_for_nbval
        use_for_nbval(config, forked=not option.fresh_kernels)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Have nbval leave out an SVG, as it does other pictures: times that a run took are drawn in some."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("image/svg+xml",)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage meanwhile: there is hardly any, and it takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was collected out of Python's garbage collection: it stays to the end, and is large.

    Then have a worker load all of torch for its ranks. Tests launch one right after the other, so the server would find
    no time to load the rest, and each rank that makes an optimizer would import it: 1.5 CPU seconds.
    """
    gc.collect()
    gc.freeze()
    needs_ranks = any(item.path.suffix == ".ipynb" or item.get_closest_marker("slow") for item in session.items)
    if hasattr(session.config, "workerinput") and needs_ranks and os.name == "posix":
        from book.launch.server import warm_up
        warm_up(whole=True)
