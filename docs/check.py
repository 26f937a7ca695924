"""Check a built site: its links lead somewhere, and it loads nothing from the network.

    python docs/check.py build/docs

Links to other sites are not followed, for nothing is fetched; they must be https.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("source", "src"), ("iframe", "src")}
"""What a browser fetches of itself; and of `link`, all that is not a relation between pages."""
RELATIONS = {"next", "prev", "index", "search", "canonical", "author", "copyright"}


class Page(HTMLParser):
    """The places of a page, what it links to and loads, and its pictures without a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.mute: list[str] = []
        self.feed(text)
        styles = " ".join(re.findall(r"<style.*?</style>", text, re.S))
        self.loads += remote_in_css(styles)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.ids |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        if tag == "link" and "href" in of:
            related = RELATIONS & set(of.get("rel", "").split())
            (self.links if related else self.loads).append(of["href"])
        self.loads += [of[name] for kind, name in LOADED if tag == kind and name in of]
        if tag == "img" and "alt" not in of:
            self.mute.append(of.get("src", ""))


def remote_in_css(text: str) -> list[str]:
    """What a style sheet takes from the network."""
    taken = re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", text)
    return [str(address) for address in taken]


def problems(site: Path) -> list[str]:
    """Everything that is wrong with a site, a line each."""
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        found += [f"{here}: {source}: no alternative text" for source in page.mute]
        for address in [*page.links, *page.loads]:
            parts = urlsplit(address)
            if parts.scheme in ("data", "mailto"):
                continue
            if parts.scheme or parts.netloc:
                if address in page.loads:
                    found.append(f"{here}: {address}: loaded from the network")
                elif parts.scheme != "https" or not parts.netloc:
                    found.append(f"{here}: {address}: expected https")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{here}: {address}: no file")
            elif target in pages and parts.fragment:
                found += [f"{here}: {address}: no place {parts.fragment!r} in it"] * (
                    unquote(parts.fragment) not in pages[target].ids
                )
    for path in sorted(site.rglob("*.css")):
        remote = remote_in_css(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(site)}: {a}: loaded from the network" for a in remote]
    return found


def main() -> None:
    site = Path(sys.argv[1])
    found = problems(site)
    pages = len(list(site.rglob("*.html")))
    print("\n".join(found) or f"{pages} pages: every link inside leads somewhere, all is local")
    sys.exit(bool(found) or not pages)


if __name__ == "__main__":
    main()
