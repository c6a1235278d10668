"""What holds of all pages: whatever they show is run by a test, and a reader finds each of them."""

from __future__ import annotations

from pathlib import Path

from restride.testing.documents import blocks_of, links_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
# Their tests run every console block of the page; that of the how-to pages runs all in the folder.
RUN = {"README.md", "docs/layouts.md", "docs/output.md"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_command_that_a_page_shows_with_its_output_is_run_by_a_test() -> None:
    shown = {
        name_of(page)
        for page in PAGES
        if any(block.language == "console" for block in blocks_of(page))
    }

    assert {name for name in shown if not name.startswith("docs/how-to/")} == RUN


def test_every_console_block_is_one_command_of_ours() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == "console":
                assert block.text.startswith("$ restride "), f"{page}: {block.text}"
                is_demo = block.text.startswith("$ restride demo")  # which shows commands itself
                assert is_demo or block.text.count("$ restride ") == 1, f"{page}: {block.text}"


def test_every_page_is_reached_from_the_first() -> None:
    reached = {README}
    following = [README]
    while following:
        page = following.pop()
        linked = {(page.parent / target).resolve() for target in links_of(page)}
        new = {each for each in linked - reached if each.suffix == ".md"}
        reached |= new
        following += new

    assert not [name_of(page) for page in PAGES if page not in reached]
