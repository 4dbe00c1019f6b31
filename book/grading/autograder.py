"""L4: a lab as what courses' systems run by themselves: Gradescope's zip, a container, GitHub Classroom's workflow."""
from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from book.grading.lab import points, read_lab

ROOT = Path(__file__).parents[2]
PACKAGE = ("pyproject.toml", "README.md", "constraints.txt")  # what an installation needs beside `book`
SYSTEM = "bubblewrap util-linux python3 python3-venv"
TORCH = "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

# Gradescope runs setup.sh once, when it builds the image, and run_autograder for each submission. What it hands over
# lies in /autograder; the variables are for trying all this elsewhere.
SETUP = f"""#!/usr/bin/env bash
# Installs what grading needs, and runs the lab's own solutions once: every submission is compared with that run.
set -euo pipefail
apt-get update && apt-get install -y --no-install-recommends {SYSTEM}
AUTOGRADER=${{AUTOGRADER:-/autograder}}
python3 -m venv "$AUTOGRADER/venv"
"$AUTOGRADER/venv/bin/pip" install --no-cache-dir {TORCH}
"$AUTOGRADER/venv/bin/pip" install --no-cache-dir -c "$AUTOGRADER/source/constraints.txt" \\
  "$AUTOGRADER/source[grade,run]"
"$AUTOGRADER/source/prepare"
"""
PREPARE = """#!/usr/bin/env bash
set -euo pipefail
AUTOGRADER=${AUTOGRADER:-/autograder}
exec "${PYTHON:-$AUTOGRADER/venv/bin/python}" -m book.grading.autograder prepare "$AUTOGRADER" @UNSAFE@
"""
RUN = """#!/usr/bin/env bash
# Grades what one student handed in, and writes results/results.json.
set -uo pipefail
AUTOGRADER=${AUTOGRADER:-/autograder}
exec "${PYTHON:-$AUTOGRADER/venv/bin/python}" -m book.grading.autograder run "$AUTOGRADER" @UNSAFE@
"""
CONTAINER = f"""# Grades a folder of submissions in a container:
#   podman build -t lockstep-grade -f Containerfile .
#   podman run --rm --network none --security-opt seccomp=unconfined --cap-add SYS_ADMIN \\
#     -v ./submissions:/submissions:ro -v ./results:/results lockstep-grade
# The sandbox needs user namespaces, which the two options give to the container. Without them it refuses to grade.
FROM docker.io/library/debian:trixie-slim
RUN apt-get update && apt-get install -y --no-install-recommends {SYSTEM} && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir {TORCH}
COPY source /source
RUN /venv/bin/pip install --no-cache-dir -c /source/constraints.txt "/source[grade,run]"
ENTRYPOINT ["/venv/bin/python", "-m", "book.grading", "grade", "/source/lab/@LAB@", "/submissions", \\
            "-o", "/results"@UNSAFE@]
"""
CLASSROOM = f"""# Runs a lab's public checks at each push to a student's repository.
# The hidden checks run on your own machine: what a student can push to, a student can read.
name: check
on: [push, workflow_dispatch]
permissions: {{contents: read}}
jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install {TORCH}
      - run: pip install -c .lockstep/constraints.txt "./.lockstep[grade,run]"
      - run: python -m book.grading check @LAB@
"""
UNSAFE = "--unsafe-no-sandbox"


def write_autograder(system: str, lab: Path, out: Path, unsafe: bool = False) -> str:
    """Writes what `system` needs to grade a lab to `out`, a zip or a folder; returns a sentence on what to do with it.

    Raises LabError for a notebook that is no lab, ValueError for an unknown system, and FileExistsError.
    """
    number = sum(points(read_lab(lab)).values())
    if system not in WRITERS:
        raise ValueError(f"there is no system {system!r}: name one of {', '.join(WRITERS)}")
    if out.exists():
        raise FileExistsError(f"{out} is there already: name another place, or remove it")
    return WRITERS[system](lab, out, unsafe).format(out=out, points=number)


def _gradescope(lab: Path, out: Path, unsafe: bool) -> str:
    option = UNSAFE if unsafe else ""
    scripts = {"setup.sh": SETUP, "run_autograder": RUN, "prepare": PREPARE}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in scripts.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16
            archive.writestr(info, text.replace("@UNSAFE@", option))
        for name, path in _sources(lab):
            archive.write(path, name)
    return ("{out}: upload it as the autograder of a programming assignment of {points} points, and give its container "
            "2 cores and 6 GB")


def _container(lab: Path, out: Path, unsafe: bool) -> str:
    _copy(lab, out / "source")
    option = f', "{UNSAFE}"' if unsafe else ""
    (out / "Containerfile").write_text(CONTAINER.replace("@UNSAFE@", option).replace("@LAB@", lab.name))
    return "{out}: its Containerfile begins with the two commands"


def _classroom(lab: Path, out: Path, unsafe: bool) -> str:
    from book.grading.release import release_all

    list(release_all([lab], out))
    _copy(None, out / ".lockstep")
    workflow = out / ".github" / "workflows" / "check.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text(CLASSROOM.replace("@LAB@", lab.name))
    return "{out}: push it as the template repository of the assignment"


WRITERS = {"gradescope": _gradescope, "container": _container, "classroom": _classroom}


def _sources(lab: Path | None) -> list[tuple[str, Path]]:
    """The package, and the lab's source in the folder `lab`, each with its name in the archive."""
    every = (path for path in sorted((ROOT / "book").rglob("*")) if path.is_file())
    package = [path for path in every if "__pycache__" not in path.parts]
    found = [(str(path.relative_to(ROOT)), path) for path in [*package, *(ROOT / name for name in PACKAGE)]]
    return [*found, (f"lab/{lab.name}", lab)] if lab else found


def _copy(lab: Path | None, to: Path) -> None:
    for name, path in _sources(lab):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(path.read_bytes())


def prepare(autograder: Path, sandboxed: bool) -> None:
    """Runs the lab's own solutions, so that submissions need not; raises SandboxError where there can be no sandbox."""
    from book.grading import sandbox
    from book.grading.grade import grade

    if sandboxed:
        sandbox.probe()
    grade(_lab_of(autograder), [], autograder / "prepared", sandboxed=sandboxed)


def run_one(autograder: Path, sandboxed: bool) -> None:
    """Grades the notebook in `submission`, and writes `results/results.json` as Gradescope reads it."""
    from book.grading.grade import grade
    from book.grading.handed_in import entry_of, notebooks_in
    from book.grading.report import gradescope

    lab = _lab_of(autograder)
    entry = entry_of("submission", notebooks_in(autograder / "submission"), lab.name)
    with tempfile.TemporaryDirectory(prefix="lockstep-results-") as folder:
        out = Path(folder) / "results"
        shutil.copytree(autograder / "prepared", out)
        (record,) = grade(lab, [entry], out, sandboxed=sandboxed)
    results = autograder / "results" / "results.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(gradescope(record), indent=1), encoding="utf-8")


def _lab_of(autograder: Path) -> Path:
    (lab,) = (autograder / "source" / "lab").glob("*.ipynb")
    return lab


def main(arguments: list[str] | None = None) -> int:
    """What the two scripts call. No result is written where grading fails: Gradescope then tells the instructor."""
    parser = argparse.ArgumentParser(prog="python -m book.grading.autograder")
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("autograder", type=Path)
    parser.add_argument(UNSAFE, action="store_true")
    options = parser.parse_args(arguments)
    try:
        {"prepare": prepare, "run": run_one}[options.what](options.autograder, not options.unsafe_no_sandbox)
    except (RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
