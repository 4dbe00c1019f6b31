"""The attention and the expert player: what real runs work on and send, right and wrong, and what a browser shows."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from book import collectives
from book.cost import Link
from book.simulate import simulate
from book.widgets import attention_player, expert_player
from book.widgets.attention import AttentionPlayer, begin, read_play, told as ring_told
from book.widgets.experts import ExpertPlayer, read_visit, told as layer_told
from tests.players import captions, figures, press, state
from tests.scores import recorded as ring, tokens_of
from tests.tokens import choices_of, recorded as layer

pytestmark = pytest.mark.slow


def said_of_ring(trace: Any) -> list[str]:
    """The captions of a run."""
    play = read_play(trace)
    return [begin(play), *("".join(a + b for a, b, *_ in sentences).strip() for sentences in ring_told(play))]


@pytest.mark.parametrize(("zigzag", "totals", "in_turn"), [(False, [10, 26, 42, 58], 58), (True, [34] * 4, 34)])
def test_a_ring_works_on_each_score_once(zigzag: bool, totals: list[int], in_turn: int) -> None:
    play = read_play(ring(zigzag=zigzag))
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
    wrong = said_of_ring(ring(fault="own mask"))
    assert wrong[-1].endswith("Wrong: of the scores, 60 with later keys and 36 missing.")
    other_way = said_of_ring(ring(fault="backwards"))
    assert other_way[2].startswith("Every rank passes keys and values on to the one before it.")
    assert other_way[-1].endswith("Done: every query has met every key up to its own, once.")


def test_what_has_no_scores_or_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="this trace has no scores: record a run"):
        attention_player(simulate(collectives.ring_all_reduce(4), 100, Link(0, 1e9)))
    with pytest.raises(ValueError, match="there is room for 4 ranks, not 8"):
        attention_player(simulate(collectives.ring_all_reduce(8), 100, Link(0, 1e9)))
    with pytest.raises(ValueError, match="of a sequence of at most 32"):
        attention_player(ring(2, num_tokens=36))
    with pytest.raises(TypeError, match="takes a recorded Trace"):
        attention_player([1])


def test_words_without_a_script_on_a_ring() -> None:
    words = AttentionPlayer({"contiguous": ring(), "zigzag": ring(zigzag=True)}).words()
    assert "rank 0 of tokens 0, 1, 14 and 15" in words and "Ranks 0, 1 and 2 wait." in words
    assert "10 to 58 scores of a rank; 58 one after another, as each hop waits for its busiest rank" in words


def test_every_stop_of_a_ring_is_told_and_drawn(show: Callable[..., Any]) -> None:
    page = show(attention_player(ring()), reduced_motion="reduce")
    assert captions(page) == said_of_ring(ring())
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


def said_of_layer(trace: Any) -> list[str]:
    """The captions of a run."""
    return ["".join(a + b for a, b, *_ in sentences).strip() for sentences in layer_told(read_visit(trace))]


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 2)])
def test_every_choice_meets_its_expert_once(num_experts: int, top_k: int) -> None:
    visit = read_visit(layer(4, num_experts, top_k, skew=1.0))
    wants = [row for rank in range(4) for row in choices_of(rank, 8, num_experts, top_k, 1.0).tolist()]
    assert list(map(list, visit.wants)) == wants
    for expert, queue in enumerate(visit.queues):  # rank by rank
        assert list(queue) == [token for token, wanted in enumerate(wants) if expert in wanted]
    assert {visit.back(token) for token in range(32)} == {1} and visit.num_dropped == 0
    assert visit.num_leaving() == sum(token // 8 != expert // (num_experts // 4)
                                      for token, wanted in enumerate(wants) for expert in wanted)


def test_a_rank_has_so_many_places_at_each_expert() -> None:
    visit, free = (read_visit(layer(skew=1.5, capacity=capacity)) for capacity in (3, 0))
    for expert, queue in enumerate(visit.queues):
        of_rank, wanted = (Counter(token // 8 for token in tokens) for tokens in (queue, free.queues[expert]))
        assert of_rank == {rank: min(num, 3) for rank, num in wanted.items()}
    assert visit.num_dropped == 32 - sum(visit.rows) > 0
    assert said_of_layer(layer(skew=1.5, capacity=3))[-1].endswith("met no expert, and the layer adds nothing to them.")


def test_a_wrong_layer_is_told() -> None:
    assert "rows met the wrong expert" in said_of_layer(layer(2, 4, 2, fault="sorted"))[-1]
    assert "tokens got what is another's" in said_of_layer(layer(2, 4, 2, fault="not in order"))[-1]


def test_what_has_no_experts_or_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="this trace has no experts: record a run"):
        expert_player(simulate(collectives.ring_all_reduce(4), 100, Link(0, 1e9)))
    with pytest.raises(ValueError, match="there is room for 64 tokens, not 72"):
        expert_player(layer(num_tokens=18))
    with pytest.raises(TypeError, match="takes a recorded Trace"):
        expert_player([1])


def test_words_without_a_script_on_a_layer() -> None:
    words = ExpertPlayer({"even": layer(), "uneven": layer(skew=1.5)}).words()
    assert "Each of 4 ranks has 8 tokens and 1 expert." in words and "an equal share is 8; 0 dropped" in words


def test_every_stop_of_a_layer_is_told_and_drawn(show: Callable[..., Any]) -> None:
    trace = layer(skew=1.5, capacity=3)
    visit = read_visit(trace)
    page = show(expert_player(trace), reduced_motion="reduce")
    assert captions(page) == said_of_layer(trace)
    assert list(figures(page).values())[:2] == [str(max(visit.rows)), str(visit.num_dropped)]
    press(page, "Home")
    coloured = []
    for stop in range(6):
        assert state(page)["step"] == str(stop)
        fills = page.eval_on_selector_all(".lk-stage:first-child svg:first-child rect",
                                          "all => all.map(e => [e.getAttribute('fill'), e.getAttribute('class')])")
        coloured.append([Counter(look for fill, look in fills if fill == f"var(--r{expert})") for expert in range(4)])
        page.keyboard.press("ArrowRight")
    for expert, queue in enumerate(visit.queues):
        kept = len(queue)
        looks = [{}, {"": kept}, {"": kept}, {"": kept, "lk-pale": kept}, {"lk-pale": 2 * kept}, {"": kept}]
        assert [stop[expert] for stop in coloured] == looks
