"""The parts of the documentation that a benchmark writes."""

import pathlib

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


def rewrite(page: pathlib.Path, name: str, text: str) -> None:
    """Put `text` between the page's markers <!-- name --> and <!-- end of name -->."""
    before, start, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not start or not end:
        raise ValueError(f"{page} has no part between <!-- {name} --> and <!-- end of {name} -->")
    page.write_text(f"{before}{start}{text.rstrip()}\n{end}{after}")
