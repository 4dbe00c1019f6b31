"""Functions of a test module that ranks get by value, as they get those of a notebook."""
import sys

import cloudpickle


def sent_by_value(module: str) -> None:
    """Have `launch` send what ranks need of this module in place of its name.

    A rank would import the module by its name, and pytest and hypothesis with it: 0.1 CPU seconds in each rank.
    """
    cloudpickle.register_pickle_by_value(sys.modules[module])
