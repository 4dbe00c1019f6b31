"""What is expensive to make, made once for a whole test run: its workers share it through a locked folder."""
from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

FOLDER = "LOCKSTEP_TEST_RUN"  # environment variable: the folder that the workers of one run share
Made = TypeVar("Made")


def share_a_folder(config: pytest.Config) -> None:
    """Give this run and its workers one folder, gone when the run ends; a worker finds it in its environment."""
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
    os.environ[FOLDER] = folder.name
    config.add_cleanup(folder.cleanup)


def folder() -> Path:
    """The folder that the workers of this run share."""
    return Path(os.environ[FOLDER])


def once(name: str, make: Callable[[], Made]) -> Made:
    """What `make` returns, from the first worker that asked for `name`; the others wait, then read its pickle.

    A `make` that raises leaves nothing: the next one to ask tries again.
    """
    kept = folder() / f"{name}.pickle"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            made = make()
            part = kept.with_suffix(".part")
            part.write_bytes(pickle.dumps(made))
            part.rename(kept)
            return made
    return pickle.loads(kept.read_bytes())
