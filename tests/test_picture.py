"""The README's picture: the run that chapter 3 stores, as it is now, and readable wherever the README is read."""
from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from book.authoring import picture
from tests.website import ROOT

READS = ["chapters/03_ring_all_reduce.ipynb", "chapters/ring_all_reduce.svg", "book/widgets/widgets.css", "README.md"]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_shows_the_run_stored_in_chapter_3() -> None:
    assert picture.PICTURE.read_text("utf-8") == picture.draw(), "draw it again: python -m book.authoring picture"
    assert f"({picture.PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text("utf-8")


def test_a_ring_adds_until_each_rank_has_a_complete_chunk_then_copies() -> None:
    panels = picture.panels_of(picture.recorded_run(picture.CHAPTER))
    whole = [sum(mask == 15 for row in held for mask in row) for _, held, _ in panels]
    assert whole == [0, 0, 0, 4, 8, 12, 16]
    assert [title for title, _, _ in panels] == ["start", *(f"step {k}: {does}" for k, does in
                                                           enumerate(["add"] * 3 + ["copy"] * 3, 1))]
    assert [len(came) for _, _, came in panels] == [0] + 6 * [4]


def test_the_picture_has_a_stripe_for_each_contribution() -> None:
    drawn = ElementTree.fromstring(picture.draw()).iter(f"{SVG}rect")
    kinds = [rect.get("class") for rect in drawn]
    panels = picture.panels_of(picture.recorded_run(picture.CHAPTER))
    masks = [mask for _, held, _ in panels for row in held for mask in row]
    for rank in range(4):
        assert kinds.count(f"r{rank}") == sum(mask >> rank & 1 for mask in masks)
    assert kinds.count("cell") == len(masks) and kinds.count("came") == 24


def test_the_picture_brings_its_own_background_in_both_themes() -> None:
    light, dark = picture.themes()
    names = {*picture.SHARED, *(f"r{rank}" for rank in range(4))}
    assert names <= light.keys() and all(light[name] != dark[name] for name in names)
    text = picture.draw()
    before, query, after = text.partition("@media(prefers-color-scheme:dark)")
    assert query and f".card{{fill:{light['bg']};" in before and f".card{{fill:{dark['bg']};" in after
    assert len(text.encode()) < 100_000 and "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_without_a_recorded_run_there_is_no_picture(tmp_path: Path) -> None:
    notebook = tmp_path / "chapter.ipynb"
    notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "outputs": []}]}), "utf-8")
    with pytest.raises(ValueError, match="no player in chapter.ipynb plays a recorded run"):
        picture.recorded_run(notebook)
