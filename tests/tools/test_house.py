"""The figures of the package's size: what counts as a comment, and who imports whom."""

from __future__ import annotations

from pathlib import Path

from tools.house import comment_share, importers, words_of


def test_comments_of_bodies_alone_are_counted() -> None:
    text = '# head\ndef f():\n    """Doc."""\n    # why\n    a = 1  # so\n\n    return a  # noqa: RET504\n'
    assert comment_share([text]) == (2, 3), "the head, the docstring, the blank line and the directive are none"


def test_importers_count_functions_imports_too() -> None:
    source = Path("src")
    texts = {
        source / "magicrl" / "a.py": "from magicrl.b import x\n",
        source / "magicrl" / "b.py": "def f():\n    from magicrl import a\n",
        source / "magicrl" / "c.py": "import magicrl.b\n",
    }
    found = importers(texts, source)
    assert found == {"magicrl.a": {"magicrl.b"}, "magicrl.b": {"magicrl.a", "magicrl.c"}, "magicrl.c": set()}


def test_words_of_code_comments_and_scripts_are_not_counted() -> None:
    page = "# A page\n\n```\nmake it\n```\n\n| 9<!--=a.b--> | - |\n"
    page += "<!-- begin x -->\nmade\n<!-- end x -->\nof *five* words.\n"
    assert words_of(page) == 6
