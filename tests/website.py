"""The website as CI builds it: from scratch, in a folder of its own, warnings counted as errors."""
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_LIMIT_S = 600
JUPYTER_BOOK = ("from book.extras import without_iri_grammar as f; f(); "
                "from jupyter_book.cli.main import main; main()")


@dataclass(frozen=True)
class Site:
    """A built website: its folder, the build's exit status and all that the build said."""

    folder: Path
    status: int
    said: str

    def pages(self) -> list[str]:
        """The website's pages, as paths below its folder."""
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*.html") if "_static" not in p.parts)


def build_site(output: Path, solutions: bool = True) -> Site:
    """Build the website into `output` as on a machine that knows no repository for the launch buttons."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")}
    environment["SOLUTIONS"] = str(int(solutions))
    command = [sys.executable, "-c", JUPYTER_BOOK, "build", ROOT, "--path-output", output, "-W", "-n", "--keep-going"]
    build = subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=BUILD_LIMIT_S,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return Site(output / "_build" / "html", build.returncode, build.stdout)
