"""`smqrt help`: the manual, which is shipped with the package as Markdown."""

from __future__ import annotations

import sys

import click

from smqrt import manual


@click.command("help")
@click.argument("topic", required=False)
def help_(topic: str | None) -> None:
    """Print the page TOPIC of the manual; without TOPIC, tell which pages there are."""
    pages = manual.pages()
    if topic is None:
        width = max(map(len, pages))
        for name, page in pages.items():
            click.echo(f"{name:{width}}  {manual.title(page)}")
        return
    name = topic.removesuffix(".md")
    if name not in pages:
        raise click.UsageError(f"There is no page {topic!r}. The pages are: {', '.join(pages)}.")
    _show(pages[name])


def _show(page: str) -> None:
    if not sys.stdout.isatty():
        click.echo(page, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(100, Console().width)).print(Markdown(page, hyperlinks=False))
