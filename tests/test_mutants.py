"""The known faults themselves: each still applies, and a run with one is in a copy that has it, and gets a verdict."""
from __future__ import annotations

import subprocess

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.copies import ROOT

FAULT = "simulate_slow_sender"
PYTHON = "{python} -c 'import book.simulate.collective as module; "


def test_each_patch_fits_and_is_headed_by_a_sentence():
    said = []
    for patch in mutants.chosen([]):
        head, blank, first, *_ = patch.read_text().splitlines()
        assert head.endswith(".") and not blank and first.startswith("--- a/book/"), patch.name
        said.append(subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True,
                                   text=True).stderr)
    assert len(said) > 60 and not any(said), "write these anew, for the code as it is now:\n" + "".join(said)


@pytest.mark.parametrize("status, printed, first", [
    (1, "F.\nFAILED tests/test_a.py::test_b[1-x] - assert 1 == 2\n1 failed\n", "tests/test_a.py::test_b[1-x]"),
    (1, "ERROR tests/test_a.py - ImportError: no\n", "tests/test_a.py"),
    (2, "make: *** [Makefile:1: quick] Error 2\n\n", "make: *** [Makefile:1: quick] Error 2"),
    (-9, "", "exit status -9"), (None, "", "not done after 5 s")])
def test_the_first_failed_test_is_reported(status, printed, first):
    assert mutants.first_failure(status, printed, 5) == first


@pytest.mark.slow
@pytest.mark.parametrize("command, status, told", [
    (f"{PYTHON}assert \"np.maximum(self.slow\" in open(module.__file__).read()'", 0, "1 of 1 found: 1 by mine"),
    (f"{PYTHON}assert \"{ROOT}\" not in module.__file__'", 1, "0 of 1 found"),
    ("{python} -c 'raise SystemExit(3)'", 2, "the tests of mine fail without any fault")],
    ids=["found", "survives", "fails anyway"])
def test_a_fault_is_put_into_the_copy_only(command, status, told, capfd):
    assert mutants.main([FAULT, "--tier", "mine", "--command", command]) == status
    assert told in "".join(capfd.readouterr())


def test_a_mutant_that_cannot_be_tried_is_reported(capfd):
    for arguments in (["no_such_fault"], [FAULT, "--tier", "fast"]):
        assert mutants.main(arguments) == 2
    assert "no patch" in (said := capfd.readouterr().err) and "not fast" in said
