"""What a graded notebook's ranks find loaded: optimizers and DDP cost each rank half a second where they are not."""
import shutil

import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book.grading.lab_schema import KEY
from book.grading.listening import ALL, SOME
from book.grading.run import loaded_at_start, run
from book.launch.imports import LATER, may_need_later

CHECK = """import sys
from book.launch import launch


def loaded():
    {}
    return "torch" in sys.modules, "torch._dynamo" in sys.modules


print(*launch(loaded, 2))"""


def notebook(source, printed=""):
    """A job with one check, which should print this."""
    mark = {KEY: {"id": "check-1", "kind": "check", "exercise": 1}}
    outputs = [new_output("stream", name="stdout", text=printed)]
    return new_notebook(cells=[new_code_cell(source, metadata=mark, outputs=outputs, execution_count=1)])


@pytest.mark.parametrize("source, loaded", [
    ("print(1)", ""), ("torch.optim.SGD", ""), ("from book.launch import launch", SOME),
    ("from book.launch import launch\ntorch.optim.SGD", ALL),
    ("from book.launch import launch\nfrom torch.nn.parallel import DistributedDataParallel", ALL)])
def test_a_notebook_has_loaded_what_its_code_may_use(source, loaded):
    assert loaded_at_start(notebook(source)) == loaded


@pytest.mark.parametrize("module", [name for name in LATER if name.startswith("torch")])
def test_an_import_of_a_later_module_is_noticed(module):
    assert may_need_later(f"import {module} as part")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="the sandbox needs bubblewrap")
@pytest.mark.parametrize("line, more", [("pass", False), ("pass  # no optimizer", True)])
def test_ranks_in_the_sandbox_find_it_loaded(line, more):
    printed = f"(True, {more}) (True, {more})\n"
    result = run(notebook(CHECK.format(line), f"2 ranks on gloo (CPU): no GPU here\n{printed}"))
    assert result.passed() == {"check-1"}, result
