"""The normal form and the lint of notebooks at their limits."""
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book.authoring.lint import ignored_outputs
from book.authoring.normalise import normalise


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def test_pieces_of_a_stream_are_joined_across_outputs_between_them():
    shown = new_output("display_data", data={"text/plain": "a player"})
    cell = new_code_cell("run()", execution_count=1,
                         outputs=[stream("1"), shown, stream("2"), stream("!", "stderr"), stream("3")])
    outputs = normalise(new_notebook(cells=[cell])).cells[0].outputs
    assert [output.get("text", output.output_type) for output in outputs] == ["123", "display_data", "!"]


@pytest.mark.parametrize("num_cells, num_ignored, is_told", [(3, 1, True), (4, 1, False), (6, 2, True), (7, 2, False)])
def test_fewer_than_a_third_of_the_cells_may_be_ignored(num_cells, num_ignored, is_told):
    ignored = [new_code_cell("clock()", metadata={"tags": ["nbval-ignore-output"]}) for _ in range(num_ignored)]
    cells = [*ignored, *(new_code_cell("1") for _ in range(num_cells - num_ignored))]
    messages = [problem.message for problem in ignored_outputs(new_notebook(cells=cells))]
    told = f"{num_ignored} of {num_cells} code cells are not compared; keep it under a third"
    assert (told in messages) == is_told
