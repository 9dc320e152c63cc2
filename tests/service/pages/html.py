"""Pages as a browser would read them."""

from __future__ import annotations

from html.parser import HTMLParser

import httpx

VOID = frozenset({"meta", "link", "input", "br", "hr", "img"})
ADDRESSES = ("href", "src", "action", "data-refresh", "data-live", "data-load")


class Document(HTMLParser):
    """The text, links and elements of a page, none of which may come from a text that the page shows.

    Attributes:
        links: addresses of links, in order.
        cells: the texts of the cells of all tables, in order.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.cells: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open}"
        assert len(set(self.ids)) == len(self.ids), "an id occurs twice"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert tag not in {"img", "iframe", "object", "style", "b2"}
        assert not [name for name in values if name == "style" or name.startswith("on")], values
        assert tag != "script" or values.get("src", "").startswith("/static/")
        for name in ADDRESSES:
            if name in values:
                assert values[name][:1] in {"/", "#"}, values[name]
                assert not values[name].startswith("//"), values[name]
        if tag == "a":
            self.links.append(values.get("href", ""))
        if "id" in values:
            self.ids.append(values["id"])
        if tag in {"td", "th"}:
            self.cells.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self._open):
            self.cells[-1] = " ".join(f"{self.cells[-1]} {data}".split())


async def page_at(client: httpx.AsyncClient, address: str, status: int = 200) -> Document:
    """Returns a page, which no other site may frame, and on which no foreign script runs."""
    answer = await client.get(address, headers={"accept": "text/html"})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    return Document(answer.text)
