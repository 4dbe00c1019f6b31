"""The programs of examples/hangs.py: what `launch` says of each is what the page "When it hangs" says."""
import re

import pytest

from examples import hangs

READS = ["examples/hangs.py", "chapters/95_when_it_hangs.md"]
SECTIONS = hangs.PAGE.read_text("utf-8").split("\n## ")[1:-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(hangs.HANGS)), ids=[program.__name__ for program in hangs.HANGS])
def test_a_program_that_hangs_gets_the_message_on_the_page(number: int) -> None:
    said = hangs.message(hangs.HANGS[number])
    assert "## " + SECTIONS[number].rstrip() == hangs.section(hangs.HANGS[number], said).rstrip(), "run `make hangs`"


def test_each_message_names_a_cause_and_the_line_of_each_rank_that_has_not_returned() -> None:
    assert len(SECTIONS) == len(hangs.HANGS)
    for section in SECTIONS:
        message = re.search(r":class: message\n(.*?)```", section, re.DOTALL)[1]
        assert "\ncause: " in message
        ranks = re.findall(r"^  rank (.*)", message, re.MULTILINE)
        assert len(ranks) == hangs.NUM_RANKS
        assert all(re.search(r"\d (finished|waits .* at line \d+: )", rank) for rank in ranks)
