"""L2: what one rank has noted of a run, as plain data: it is pickled, and read where torch is not loaded."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from book.audit.layouts import Layout
    from book.audit.passed import Use
    from book.audit.shorter import Shorter
    from book.audit.threads import Turns
    from book.audit.touched import Touched

PlaceOf = Callable[[str, int], Any]  # str() of what it returns is the place: "train.py line 7: loss.backward()"


class Notes(NamedTuple):
    """What one rank has noted; each field belongs to the module that fills it."""
    layouts: tuple[Layout, ...] = ()
    shorter: tuple[Shorter, ...] = ()
    touched: tuple[Touched, ...] = ()
    threads: tuple[Turns, ...] = ()
    uses: tuple[Use, ...] = ()
