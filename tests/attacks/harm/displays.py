# exercise: 1
# ends:

# Pictures and pages without end.
from IPython.display import HTML, display


def chunk_bounds(length, num_chunks):
    while True:
        display(HTML("<b>x</b>"), display_id=True, metadata={"x": ["y"] * 10})
