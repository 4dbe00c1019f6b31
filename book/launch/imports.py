"""L2: the modules that the fork server imports, so that no rank has to."""
from __future__ import annotations

FIRST = (
    "torch",
    "torch.distributed.rpc",
    "cloudpickle",
    "numpy.random",
    "book.launch.child",
    "book.tap.functions",  # what a rank imports when it starts to be seen
    "book.audit.hooks",
    "book.audit.sharded",
    "book.record",
)
WITH_ALL = ("book.checks",)  # packages that are imported with all their modules: a lab's functions refer to some
LATER = (  # together these take as long as `FIRST`; the first ranks do not wait for them
    "book.parallel.hybrid",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "fsspec",  # checkpoint imports this and the next one when it first saves
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.profiler",
)
# Code with none of these words makes no optimizer, no DDP and no mesh, and needs nothing of `LATER`.
WORDS_FOR_LATER = ("optim", "arallel", "checkpoint", "mesh", "profiler", "compile", "torch.distributed.")
# In the server's environment: those of `LATER` that it imports at once, and the launcher's folder, where its socket is.
USED, FOLDER = "LOCKSTEP_USED", "LOCKSTEP_FOLDER"


def may_need_later(source: str) -> bool:
    """Whether code may use modules of `LATER`: each rank would import them by itself if the server had not."""
    return any(word in source for word in WORDS_FOR_LATER)
