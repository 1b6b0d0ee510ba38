"""What the pages name exists: links, files, modules, and the places that the glossary gives."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
SAID = [page for page in PAGES if page.name not in ("CHANGELOG.md", "RESULTS.md")]  # of today
FOLDERS = tuple(f"{each.parent.name}/" for each in ROOT.glob("*/__init__.py"))
EXAMPLES = {"l4_pool.py", "l4.py", "softsign2.py", "net.py", "soapstone_spare.py"}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", SAID, ids=lambda page: page.name)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    known = {path.name for path in ROOT.rglob("*.py")} | EXAMPLES
    paths = {name for name in re.findall(r"`([\w./]+\.(?:py|json|toml|md))`", text) if "/" in name}
    wrong = [name for name in paths if name.startswith(FOLDERS) and not _there(name)]
    files = set(re.findall(r"(?<![\w./`-])`([a-z]\w*\.py)`", text))
    wrong += sorted(files - known)
    modules = re.findall(r"^(?:from|import) (soapstone[\w.]*)", text, re.M)
    wrong += [name for name in modules if importlib.util.find_spec(name) is None]
    assert wrong == []


# What the table of equivalents says by the name of a loss, or has no need to say
KNOWN = {"BCE", "Constant", "DenseCrossEntropy", "InverseRoot", "LinearWarmup", "MAE", "MAPE"}
KNOWN |= {"MSE", "MSLE", "Quantile"}


def test_what_stands_for_other_libraries_exists() -> None:
    import soapstone
    from soapstone import SGD, Model, callbacks, data, losses, metrics, optimizers, schedules

    text = (ROOT / "docs" / "equivalents.md").read_text("utf-8")
    here = " ".join(re.findall(r"^\|.*\|(.*)\|$", text, re.M))
    known = {"model": Model, "soapstone": soapstone, "SGD": SGD}
    for of, name in re.findall(r"`(model|soapstone)\.(\w+)", here):
        assert hasattr(known[of], name), name
    homes = (SGD, callbacks, data, losses, metrics, optimizers, schedules, soapstone)
    classes = list(re.findall(r"`([A-Z]\w+)", here))
    assert len(classes) > 40
    assert [name for name in classes if not any(hasattr(home, name) for home in homes)] == []
    activations = text.partition("**Activations**")[2].partition("##")[0]
    layers = re.findall(r"`([a-z]\w+)`", activations)
    assert len(layers) > 20
    assert [name for name in layers if not hasattr(Model, name) and name != "activation"] == []
    of_tables = {*losses.__all__, *optimizers.__all__, *schedules.__all__}
    settled = {"Composed", "Formulated", "FunctionLoss", "Loss", "Optimizer", "Schedule", "Update"}
    assert {name for name in of_tables - settled if not re.search(rf"\b{name}\b", text)} == KNOWN


def _there(name: str) -> bool:
    return (ROOT / name).exists() or Path(name).name in EXAMPLES


def test_the_glossary_says_where_things_are() -> None:
    rows = re.findall(r"^\| (?!term|---)(.+?) \| (.+) \| (.+) \|$", _glossary(), re.M)
    assert len(rows) > 60
    wrong = []
    for term, said, place in rows:
        path, *names = re.findall(r"`([^`]+)`", place)
        text = (ROOT / path).read_text("utf-8") if (ROOT / path).is_file() else ""
        if not text or any(not re.search(rf"\b{name}\b", text) for name in names):
            wrong.append(f"{term}: {place}")
        if said[-1] != "." or len(said.split()) < 5:
            wrong.append(f"{term}: {said!r} is no sentence")
    assert wrong == []
    terms = [term for term, _, _ in rows]
    assert len(terms) == len(set(terms))


def _glossary() -> str:
    return (ROOT / "docs" / "glossary.md").read_text("utf-8")
