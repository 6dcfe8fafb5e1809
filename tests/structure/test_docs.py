"""Every file, link and anchor that the documentation names is there, every folder is named, and prose wraps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "recipes/README.md")]
NOTES = sorted((ROOT / "benchmarks/notes").glob("*.md"))  # not wrapped: what was measured, as it was written then
WRAPPED = sorted([*TOP, *(ROOT / "docs").glob("*.md")])
PAGES = [*WRAPPED, *NOTES]
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.<-])((?:[\w.-]+/)+[\w.-]+\.(?:py|json|yaml|md))\b")
BARE = re.compile(r"`([\w-]+\.py)`")
NO_PROSE = re.compile(r"(    |#|\s*\|)")  # code, headings, tables
WIDTH = 100
PACKAGES = ("kernels", "rollout", "weight_sync")
SHORTHANDS = (
    ROOT,
    ROOT / "benchmarks",
    ROOT / "kernels",
    ROOT / "rollout",
    ROOT / "rollout/integrations/verl",
    ROOT / "recipes",
    ROOT / "weight_sync",
)
NAMES = {
    path.name
    for top in ("benchmarks", "kernels", "recipes", "rollout", "tests", "weight_sync")
    for path in (ROOT / top).rglob("*.py")
}


def anchors(page: Path) -> set[str]:
    """Return the anchors that a code host makes of the page's headings."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    missing = []
    for link in LINK.findall(text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            missing.append(link)
    folders = (page.parent, *SHORTHANDS)
    missing += [name for name in FILE.findall(LINK.sub("", text)) if not any((at / name).exists() for at in folders)]
    missing += [name for name in BARE.findall(text) if name not in NAMES]
    assert not [name for name in missing if not name.startswith(("runs/", "path/", "models/"))]


def test_the_architecture_page_has_every_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("## The folders")[2].partition("\n## ")[0]
    folders = {f"{top}/{found.parent.name}/" for top in PACKAGES for found in (ROOT / top).glob("*/__init__.py")}
    assert set(re.findall(rf"`((?:{'|'.join(PACKAGES)})/\w+/)`", section)) == folders


@pytest.mark.parametrize("page", [*WRAPPED, ROOT / "SECURITY.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_wraps(page: Path) -> None:
    """Lines of prose are short, but for what can not be broken, such as a link."""
    lines = FENCE.sub(lambda fence: "\n" * fence.group().count("\n"), page.read_text()).splitlines()
    prose = {number: line for number, line in enumerate(lines, 1) if not NO_PROSE.match(line)}
    assert not {number: line for number, line in prose.items() if len(line) > WIDTH and " " in line.strip()}
