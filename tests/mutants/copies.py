"""A copy of the working tree in which a fault can be put without anybody noticing elsewhere."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOBODY = ["-c", "user.name=mutants", "-c", "user.email=mutants@localhost", "-c", "commit.gpgsign=false"]


class MutantError(Exception):
    """Why mutants can't be tried, in one sentence."""


class Copy:
    """What git does not ignore, as it now is, in a repository of its own, and the environment beside it.

    Kernels, ranks and sandboxes find `book` through the environment, so that is copied too, to `.venv`: by hard links,
    with this checkout's paths replaced by the copy's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / ".venv" / "bin" / "python"
        known = _output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
        for name in known.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        _copy_environment(Path(sys.prefix), folder)
        for words in (["init", "-q"], ["add", "-A"], [*NOBODY, "commit", "-q", "-m", "The tree without a fault"]):
            _output(["git", *words], folder)
        found = _output([str(self.python), "-c", "import book; print(book.__file__)"], Path("/"), self.environment())
        if folder not in Path(found.strip()).parents:
            raise MutantError(f"in the copy Python imports book from {found.strip()} and not from {folder}: "
                              "install the book in the environment with pip install -e .")

    def environment(self) -> dict[str, str]:
        """The environment variables with which commands run in the copy."""
        kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
        return {**kept, "PYTHONPATH": str(self.folder), "PATH": f"{self.python.parent}:{kept.get('PATH', '')}"}

    def apply(self, patch: Path) -> None:
        """Put a fault in. Raises MutantError where the patch no longer fits."""
        run = subprocess.run(["git", "apply", str(patch)], cwd=self.folder, capture_output=True, text=True)
        if run.returncode:
            raise MutantError(f"{patch.stem} does not apply, so it has to be written anew: {run.stderr.strip()}")

    def restore(self) -> None:
        """Take the fault out, and all that a run has left."""
        _output(["git", "checkout", "-q", "--", "."], self.folder)
        _output(["git", "clean", "-fdqx", "-e", ".venv"], self.folder)

    def run(self, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """The exit status of a command and what it printed; None where it was not done after `limit_s` seconds."""
        with subprocess.Popen(command, cwd=self.folder, env=self.environment(), text=True, errors="replace",
                              start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT) as process:
            try:
                printed, _ = process.communicate(timeout=limit_s)
                return process.returncode, printed
            except subprocess.TimeoutExpired:
                return None, ""
            finally:  # also when the whole run is interrupted
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def _copy_environment(prefix: Path, folder: Path) -> None:
    """The environment at `prefix` as the copy's `.venv`, with the copy's paths in what names the checkout's."""
    try:
        shutil.copytree(prefix, folder / ".venv", symlinks=True, copy_function=_link)
    except shutil.Error as error:
        raise MutantError(f"the environment {prefix} can't be copied: {error.args[0][0]}") from None
    packages = folder / ".venv" / Path(sysconfig.get_path("purelib")).relative_to(prefix)
    for file in [*packages.glob("__editable__*"), *(folder / ".venv" / "bin").iterdir()]:
        if file.is_file() and not file.is_symlink() and str(ROOT).encode() in (content := file.read_bytes()):
            mode = file.stat().st_mode
            file.unlink()  # it is the same file as the environment's
            file.write_bytes(content.replace(str(prefix).encode(), str(folder / ".venv").encode())
                             .replace(str(ROOT).encode(), str(folder).encode()))
            file.chmod(mode)
    for stamp in (folder / ".venv").glob(".requirements-*"):  # the copy is as new as it gets: make must not install
        stamp.unlink()
        stamp.touch()


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def _output(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise MutantError(f"{' '.join(command)} fails: {run.stderr.strip()}")
    return run.stdout
