"""The expert player: what real layers of experts send and drop, right and wrong, and what it shows in a browser."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from book import collectives
from book.cost import Link
from book.simulate import simulate
from book.widgets import expert_player
from book.widgets.experts import ExpertPlayer, read_visit, told
from tests.players import captions, figures, press, state
from tests.tokens import choices_of, recorded

pytestmark = pytest.mark.slow


def said(trace: Any) -> list[str]:
    """The captions of a run."""
    return ["".join(a + b for a, b, *_ in sentences).strip() for sentences in told(read_visit(trace))]


@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 2)])
def test_every_choice_meets_its_expert_once(num_experts: int, top_k: int) -> None:
    visit = read_visit(recorded(4, num_experts, top_k, skew=1.0))
    wants = [row for rank in range(4) for row in choices_of(rank, 8, num_experts, top_k, 1.0).tolist()]
    assert list(map(list, visit.wants)) == wants
    for expert, queue in enumerate(visit.queues):  # rank by rank
        assert list(queue) == [token for token, wanted in enumerate(wants) if expert in wanted]
    assert {visit.back(token) for token in range(32)} == {1} and visit.num_dropped == 0
    assert visit.num_leaving() == sum(token // 8 != expert // (num_experts // 4)
                                      for token, wanted in enumerate(wants) for expert in wanted)


def test_a_rank_has_so_many_places_at_each_expert() -> None:
    visit, free = (read_visit(recorded(skew=1.5, capacity=capacity)) for capacity in (3, 0))
    for expert, queue in enumerate(visit.queues):
        of_rank, wanted = (Counter(token // 8 for token in tokens) for tokens in (queue, free.queues[expert]))
        assert of_rank == {rank: min(num, 3) for rank, num in wanted.items()}
    assert visit.num_dropped == 32 - sum(visit.rows) > 0
    assert said(recorded(skew=1.5, capacity=3))[-1].endswith("met no expert, and the layer adds nothing to them.")


def test_a_wrong_layer_is_told() -> None:
    assert "rows met the wrong expert" in said(recorded(2, 4, 2, fault="sorted"))[-1]
    assert "tokens got what is another's" in said(recorded(2, 4, 2, fault="not in order"))[-1]


def test_what_has_no_experts_or_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="this trace has no experts: record a run"):
        expert_player(simulate(collectives.ring_all_reduce(4), 100, Link(0, 1e9)))
    with pytest.raises(ValueError, match="there is room for 64 tokens, not 72"):
        expert_player(recorded(num_tokens=18))
    with pytest.raises(TypeError, match="takes a recorded Trace"):
        expert_player([1])


def test_words_without_a_script() -> None:
    words = ExpertPlayer({"even": recorded(), "uneven": recorded(skew=1.5)}).words()
    assert "Each of 4 ranks has 8 tokens and 1 expert." in words and "an equal share is 8; 0 dropped" in words


def test_every_stop_is_told_and_drawn(show: Callable[..., Any]) -> None:
    trace = recorded(skew=1.5, capacity=3)
    visit = read_visit(trace)
    page = show(expert_player(trace), reduced_motion="reduce")
    assert captions(page) == said(trace)
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
