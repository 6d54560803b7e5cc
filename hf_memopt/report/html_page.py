"""Pages of HTML that need nothing beside them, made from the templates in `templates/`."""

import base64
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_page(template: str, title: str, facts: Mapping[str, str], headlines: list[str], **values: Any) -> str:
    """Return a whole page.

    Args:
        template: file name in `templates/`, which extends `page.html`.
        title: title of the page.
        facts: the beginning of the page, by name.
        headlines: the most important results, in words.
        values: variables of the template itself. Text among them is escaped.
    """
    environment = Environment(
        loader=PackageLoader("hf_memopt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    return environment.get_template(template).render(title=title, facts=facts, headlines=headlines, **values)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
