"""The site: it builds strictly, without the network, and asks a reader's browser for nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Proxies that lead nowhere: whoever asks the network fails."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """Addresses that a browser loads by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("href") if tag == "link" and given.get("rel") != "canonical" else given.get("src")
        if address:
            self.addresses.append(address)


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {page.name for page in pages} >= {f"{page.stem}.html" for page in DOCS.glob("*.md")}
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.addresses, page
        elsewhere = [address for address in loaded.addresses if urlsplit(address).netloc]
        assert not elsewhere, f"{page.name} loads {elsewhere}"


def test_its_style_loads_nothing_from_elsewhere(site: Path) -> None:
    styles = list(site.rglob("*.css"))
    assert styles
    for style in styles:
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", style.read_text(encoding="utf-8")), style.name


def test_the_first_page_leads_to_every_other(site: Path) -> None:
    linked = set(re.findall(r"\]\((\w[\w-]*\.md)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"index.md"}


def test_the_readme_links_to_what_there_is() -> None:
    targets = re.findall(r"\]\(([^)#]+)", PAGES[0].read_text(encoding="utf-8"))
    assert targets and all((ROOT / target).exists() for target in targets), targets
