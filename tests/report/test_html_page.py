import base64
from typing import Any

from hf_memopt.report.html_page import render_page
from hf_memopt.text_table import Table

PNGS = {"light": b"light", "dark": b"dark"}


def page(**changes: Any) -> str:
    values: dict[str, Any] = {"pngs": PNGS, "largest": Table(["MiB", "owner"], [[1.5, "<w>"], [None, "b"]])}
    return render_page("estimate.html", "a < b", {"fact": "& so"}, ["first"], **{**values, **changes})


def test_text_is_escaped_and_figures_are_inside() -> None:
    html = page()
    assert "<title>a &lt; b</title>" in html
    assert "<dt>fact</dt><dd>&amp; so</dd>" in html
    assert '<p class="headline">first</p>' in html
    for png in PNGS.values():
        assert f"data:image/png;base64,{base64.b64encode(png).decode()}" in html


def test_numbers_stand_to_the_right() -> None:
    html = page()
    assert '<tr><th class="number">MiB</th><th>owner</th></tr>' in html
    assert '<tr><td class="number">1.5</td><td>&lt;w&gt;</td></tr>' in html
    assert '<tr><td class="number">-</td><td>b</td></tr>' in html
