"""The attention player: what real rings work on and send, right and wrong, and what it shows in a browser."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from book import collectives
from book.simulate import simulate
from book.cost import Link
from book.widgets import attention_player
from book.widgets.attention import AttentionPlayer, begin, read_play, told
from tests.players import captions, figures, press, state
from tests.scores import recorded, tokens_of

pytestmark = pytest.mark.slow


def said(trace: Any) -> list[str]:
    """The captions of a run."""
    play = read_play(trace)
    return [begin(play), *("".join(a + b for a, b, *_ in sentences).strip() for sentences in told(play))]


@pytest.mark.parametrize(("zigzag", "totals", "in_turn"), [(False, [10, 26, 42, 58], 58), (True, [34] * 4, 34)])
def test_a_ring_works_on_each_score_once(zigzag: bool, totals: list[int], in_turn: int) -> None:
    play = read_play(recorded(zigzag=zigzag))
    assert (play.totals, play.in_turn) == (totals, in_turn)
    assert play.counted() == [[int(key <= query) for key in range(16)] for query in range(16)]
    for rank in range(4):
        assert [token for token, owner in enumerate(play.rows) if owner == rank] == tokens_of(
            rank, 4, 16, zigzag).tolist()
        assert [hop.holds[rank] for hop in play.hops] == [(rank - hop) % 4 for hop in range(4)]
        for hop in play.hops:  # whose keys a rank works on is told by numbers, whose it has by messages
            used = {play.rows[key] for keys in hop.scores[rank].values() for key in keys}
            assert used <= {hop.holds[rank]}


def test_a_wrong_ring_is_told() -> None:
    wrong = said(recorded(fault="own mask"))
    assert wrong[-1].endswith("Wrong: of the scores, 60 with later keys and 36 missing.")
    other_way = said(recorded(fault="backwards"))
    assert other_way[2].startswith("Every rank passes keys and values on to the one before it.")
    assert other_way[-1].endswith("Done: every query has met every key up to its own, once.")


def test_what_has_no_scores_or_too_much_is_refused() -> None:
    ring = simulate(collectives.ring_all_reduce(4), 100, Link(0, 1e9))
    with pytest.raises(ValueError, match="this trace has no scores: record a run"):
        attention_player(ring)
    with pytest.raises(ValueError, match="there is room for 4 ranks, not 8"):
        attention_player(simulate(collectives.ring_all_reduce(8), 100, Link(0, 1e9)))
    with pytest.raises(ValueError, match="of a sequence of at most 32"):
        attention_player(recorded(2, num_tokens=36))
    with pytest.raises(TypeError, match="takes a recorded Trace"):
        attention_player([1])


def test_words_without_a_script() -> None:
    words = AttentionPlayer({"contiguous": recorded(), "zigzag": recorded(zigzag=True)}).words()
    assert "rank 0 of tokens 0, 1, 14 and 15" in words and "Ranks 0, 1 and 2 wait." in words
    assert "10 to 58 scores of a rank; 58 one after another, as each hop waits for its busiest rank" in words


def test_every_stop_is_told_and_drawn(show: Callable[..., Any]) -> None:
    page = show(attention_player(recorded()), reduced_motion="reduce")
    assert captions(page) == said(recorded())
    assert list(figures(page).values()) == ["10 to 58", "58", "3.07 kB"]
    press(page, "Home")
    counts = []
    for stop in range(5):
        assert state(page)["step"] == str(stop)
        chips = page.eval_on_selector_all(".lk-stage:first-child svg:first-child text",
                                          "all => all.map(e => e.textContent).filter(t => /^K, V/.test(t))")
        counts.append([int(text.split()[-1]) for text in chips])
        page.keyboard.press("ArrowRight")
    assert counts == [[0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]
    colours = page.eval_on_selector_all("rect.lk-pale, rect[class='']", "all => all.map(e => e.getAttribute('fill'))")
    assert [colours.count(f"var(--r{rank})") for rank in range(4)] == [10, 26, 42, 58]
