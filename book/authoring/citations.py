"""L4: how the website's text names a source: by author and year, or by its title where it has no year.

Most pages of documentation and source files have none. "PyTorch contributors, n.d." five times on a screen would not
tell one of them from another.
"""
from __future__ import annotations

from dataclasses import dataclass

from pybtex.style.template import Node, field, first_of, optional
from sphinx.application import Sphinx
from sphinxcontrib.bibtex.plugin import register_plugin
from sphinxcontrib.bibtex.style.referencing.basic_author_year import BasicAuthorYearParentheticalReferenceStyle
from sphinxcontrib.bibtex.style.template import join, join2, post_text, pre_text, reference

STYLE = "author_year_or_title"


@dataclass
class AuthorYearOrTitle(BasicAuthorYearParentheticalReferenceStyle):
    """The reference style of `_config.yml`; for {cite} alone."""

    def inner(self, role_name: str) -> Node:
        """What stands for one source between the brackets."""
        dated = join(sep=self.author_year_sep)[
            self.person.author_or_editor_or_title(full="s" in role_name), field("year")]
        return join2(sep1=self.pre_text_sep, sep2=self.post_text_sep)[
            pre_text, reference[first_of[optional[dated], field("title")]], post_text]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the style with sphinxcontrib-bibtex."""
    register_plugin("sphinxcontrib.bibtex.style.referencing", STYLE, AuthorYearOrTitle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
