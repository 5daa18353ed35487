"""`smqrt help`: the manual, which is shipped with the package as Markdown."""

from __future__ import annotations

import sys
from importlib import resources
from importlib.resources.abc import Traversable

import click


@click.command("help")
@click.argument("topic", required=False)
def help_(topic: str | None) -> None:
    """Print the page TOPIC of the manual; without TOPIC, tell which pages there are."""
    pages = manual()
    if topic is None:
        width = max(map(len, pages))
        for name, page in pages.items():
            click.echo(f"{name:{width}}  {_title(page)}")
        return
    name = topic.removesuffix(".md")
    if name not in pages:
        raise click.UsageError(f"There is no page {topic!r}. The pages are: {', '.join(pages)}.")
    _show(pages[name])


def manual() -> dict[str, str]:
    """Returns the pages of the manual by name, such as "quick-start" or "decisions/0001-http-front"."""
    folder = resources.files("smqrt") / "help"
    return dict(sorted(_pages(folder, ""), key=lambda page: ("/" in page[0], page[0])))


def _pages(folder: Traversable, prefix: str) -> list[tuple[str, str]]:
    pages = []
    for entry in folder.iterdir():
        if entry.is_dir():
            pages += _pages(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".md"):
            pages.append((prefix + entry.name.removesuffix(".md"), entry.read_text("utf-8")))
    return pages


def _title(page: str) -> str:
    return page.partition("\n")[0].lstrip("# ")


def _show(page: str) -> None:
    if not sys.stdout.isatty():
        click.echo(page, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(100, Console().width)).print(Markdown(page, hyperlinks=False))
