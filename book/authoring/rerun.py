"""Run a notebook as nbval will, in its own folder, and store its outputs in normal form."""
from __future__ import annotations

from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets import default

from book.authoring.normalise import normalise
from book.authoring.notebooks import NotebookError, parse


class OwnPython(AsyncKernelManager):
    """Kernels of this environment's Python, whatever kernel the user has installed as python3."""

    @default("kernel_spec_manager")
    def _no_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(parent=self, kernel_dirs=[])


def rerun(path: Path, cell_timeout_s: int = 120) -> None:
    """Execute the notebook at `path` and rewrite it in normal form; a cell that fails leaves the file as it was."""
    notebook = parse(path.read_text(encoding="utf-8"), path)
    execute(notebook, path, cell_timeout_s)
    text = nbformat.writes(normalise(notebook)).rstrip("\n") + "\n"
    path.write_text(text, encoding="utf-8")


def execute(notebook: NotebookNode, path: Path, cell_timeout_s: int) -> None:
    """Run every cell of `notebook` with this environment's Python, in a new kernel."""
    client = NotebookClient(notebook, kernel_manager_class=OwnPython, kernel_name="python3", timeout=cell_timeout_s,
                            record_timing=False, store_widget_state=False,
                            resources={"metadata": {"path": str(path.parent)}})
    try:
        client.execute()
    except CellExecutionError as error:
        raise NotebookError(f"{path}: a cell failed, the stored notebook is unchanged.\n{error}") from error
    except CellTimeoutError as error:
        raise NotebookError(f"{path}: a cell took longer than {cell_timeout_s} s, "
                            f"the stored notebook is unchanged.\n{error}") from error
    except DeadKernelError as error:
        raise NotebookError(f"{path}: the kernel died, the stored notebook is unchanged.") from error
