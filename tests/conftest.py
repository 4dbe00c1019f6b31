"""Fixtures that several test modules share: the built website, its address, a browser."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from book.authoring.serve import served
from tests.browser import Browser, running_browser
from tests.website import Site, build_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The website, built once for all tests."""
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def site_url(site: Site) -> Iterator[str]:
    """The address of the built website on this machine, without a final slash."""
    with served(site.folder) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium. It ends with its module: its event loop must not run beside nbval's kernels."""
    with running_browser() as running:
        yield running
