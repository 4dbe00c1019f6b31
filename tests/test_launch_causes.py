"""Which of several failures a launch blames."""
import os
import time

import pytest

from book.launch import LaunchError, launch


def one_dies_and_another_raises() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(0.1)
    raise ValueError("without its peer")


@pytest.mark.slow
def test_a_death_is_the_cause_of_an_error_that_comes_later():
    with pytest.raises(LaunchError, match="rank 1 ended with exit code 3"):
        launch(one_dies_and_another_raises, 2)
