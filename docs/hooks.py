"""What the site shows of the repository outside ``docs``: figures, results and notebooks, under their own paths.

A page links to them relative to itself, as ``../../benchmarks/...``, so that the links hold in the repository too. Here the
files are added to the site, and the links follow.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SHOWN = (
    "benchmarks/*.py",
    "benchmarks/*/*.png",
    "benchmarks/*/*.json",
    "benchmarks/*/*.md",
    "benchmarks/examples/*.p*",
    "tutorials/*.ipynb",
    "tutorials/*.py",
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the repository's figures, results and notebooks."""
    root = Path(config.config_file_path).resolve().parents[1]
    for pattern in SHOWN:
        for path in sorted(root.glob(pattern)):
            files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to the repository's files point to where they are in the site."""
    return markdown.replace("](../../", "](")
