"""How nbval runs the book's notebooks wherever pytest is started: strictly, in this Python, 2 minutes for a cell."""
import itertools
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.once import share_a_folder

# jsonschema, which nbformat checks notebooks with, imports this to check IRIs. It builds a grammar for 3.5 s in each
# pytest process, and no notebook has an IRI to check.
sys.modules.setdefault("rfc3987_syntax", None)

CELL_TIMEOUT_S = 120.0
NBVAL_DEFAULT_TIMEOUT_S = 2000.0


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
        _speak_over_files(config)


def _speak_over_files(config: pytest.Config) -> None:
    """Have nbval speak to its kernels over sockets in a folder.

    Over TCP a kernel is given ports that are free, and binds them a second later: by then the ranks of another notebook
    may have taken one, and the kernel dies.
    """
    from jupyter_client.manager import KernelManager
    from nbval import kernel

    folder = tempfile.TemporaryDirectory(prefix="nbval-", dir="/tmp")  # a socket's name has room for 100 characters
    config.add_cleanup(folder.cleanup)
    names = (f"{folder.name}/{number}" for number in itertools.count())
    kernel.KernelManager = lambda **options: KernelManager(transport="ipc", ip=next(names), **options)
