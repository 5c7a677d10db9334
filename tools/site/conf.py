"""Sphinx configuration: `make site` builds the site from this repository's Markdown, strictly and offline."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import generated

# pages linked by the index of a study
STUDIES = {
    "docs/evidence/study/index": [*map(str, range(13)), "figures", "costs", "questions"],
    "docs/evidence/study-starts/index": ["20", "21", "22", "starts", "why", "race"],
    "docs/evidence/study-recipe/index": ["30", "31", "32"],
    "docs/evidence/study-target/index": ["40", "41", "42"],
    "docs/evidence/study-noise/index": ["60", "61", "62"],
    "docs/evidence/study-smollm2/index": ["50"],
    "docs/evidence/study-clip/index": ["70", "71"],
}

project = "magicrl"
author = "the magicrl authors"
copyright = "Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
# The source is the repository, so links work both on the site and in the files.
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**"]
exclude_patterns = ["docs/log/**"]
html_extra_path = ["../../docs/quickstart.html"]
html_theme = "furo"
html_title = "magicrl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
smartquotes = False
highlight_language = "text"  # unmarked blocks are commands; as Python, some of their words would be coloured
nitpicky = False  # Markdown links are checked anyway; types of other packages have no page here


def pages_of_ours(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Open linked pages that Sphinx does not make (the committed report) instead of downloading them."""
    for node in doctree.findall(download_reference):
        if node["reftarget"].endswith("quickstart.html"):
            depth = docname.count("/")
            node.replace_self(nodes.reference("", "", *node.children, refuri="../" * depth + "quickstart.html"))


def filled(app: Sphinx, docname: str, source: list[str]) -> None:
    """Insert the navigation and generated parts into the text of a page."""
    if docname == "docs/index":
        source[0] += navigation(source[0])
    if docname in STUDIES:
        source[0] += toctree(STUDIES[docname])
    for name, made in generated.PARTS.items():
        if (place := f"<!-- {name} -->") in source[0]:
            source[0] = source[0].replace(place, made())


def navigation(index: str) -> str:
    """Return the sidebar: the first page's headings and, under each, the linked pages, once."""
    parts = re.split(r"^## (.+)$", index, flags=re.MULTILINE)[1:]
    seen: set[str] = set()
    made = ""
    for layer, text in zip(parts[::2], parts[1::2], strict=True):
        links = re.findall(r"\[([^]]+)\]\(([\w./-]+)\.md\)", text)
        titled = [(title[:1].upper() + " ".join(title.split())[1:], page) for title, page in links if page not in seen]
        made += toctree([f"{title} <{page}>" for title, page in titled], f":caption: {layer}")
        seen |= {page for _, page in links}
    return made


def toctree(pages: list[str], *options: str) -> str:
    return "\n".join(["\n\n```{toctree}", ":hidden:", *options, "", *pages, "```\n"])


def breakable(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: nodes.document) -> None:
    """Let code break after the separators of long names only, so that a phone shows whole words and options."""

    def marked(found: re.Match[str]) -> str:
        word = found[1]
        if len(word) > 16 and (parts := re.sub(r"([._/=,])(?=\w)", r"\1<wbr>", word)) != word:
            return f'<span class="pre">{parts}</span>'
        return f'<span class="pre whole">{word}</span>' if len(word) < 30 else found[0]

    def with_whole_options(block: re.Match[str]) -> str:
        # a browser breaks a line after each hyphen, so that --output would become "-" and "-output"
        text = re.sub(r"(?<=[>\s])[^\s<>]*-[^\s<>]*(?=[<\s])", lambda word: _whole(word[0]), block[0])
        # site.css uses these places on a phone only: a call without a space is longer than a line there
        return re.sub(r"(<span class=\"(?:p|o)\">[^<]*[(\[.,]</span>)", r"\1<wbr>", text)

    body = re.sub(r'<span class="pre">([^<>]+)</span>', marked, context.get("body", ""))
    context["body"] = re.sub(r"<pre>.*?</pre>", with_whole_options, body, flags=re.DOTALL)


def _whole(word: str) -> str:
    return f'<span class="whole">{word}</span>' if len(word) < 34 else word


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", filled)
    app.connect("doctree-resolved", pages_of_ours)
    app.connect("html-page-context", breakable)
    return {"parallel_read_safe": True}
