"""The server's page: one document with its style and script inside, and the policy that lets in these and nothing else.

There is no build step: the files next to this one are joined as they are. The style begins with that of the reports, so
that both stay one family.
"""

from functools import lru_cache
from importlib import resources
from typing import Final

from vitrail.report.page import digest, template

STYLES: Final = ("page.css",)
SCRIPTS: Final = ("server.js", "maps.js", "pictures.js", "samples.js", "stage.js", "page.js", "hands.js")  # one scope


@lru_cache(maxsize=1)
def page() -> str:
    """The whole document, the same for every model: what it shows of one it asks the server for."""
    return part("index.html").replace("{style}", style()).replace("{script}", script())


@lru_cache(maxsize=1)
def policy() -> str:
    """The Content-Security-Policy to send with it: its own style and script by their hashes, images that are already
    in the browser, requests to where it came from."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{digest(script())}'",
            f"style-src 'sha256-{digest(style())}'",
            "img-src blob: data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


@lru_cache(maxsize=1)
def style() -> str:
    return "\n".join([template("page.css"), *map(part, STYLES)])


@lru_cache(maxsize=1)
def docs_style() -> str:
    """Of the description of the interface: the page's, and a little more."""
    return "\n".join([style(), part("docs.css")])


@lru_cache(maxsize=1)
def script() -> str:
    return "\n".join(map(part, SCRIPTS))


def part(name: str) -> str:
    """The text of a file of this folder."""
    return resources.files("vitrail.serve.page").joinpath(name).read_text("utf-8")
