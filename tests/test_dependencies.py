"""pyproject.toml declares what the package imports, and constraints.txt pins all of it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def plain(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def imported() -> set[str]:
    """The top-level names that any file of the package or of the studies imports."""
    names = set()
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "studies").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"slipstream", "studies"}


def test_every_import_is_declared():
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["serve"] + extras["ray"]
    declared, providers = {plain(each) for each in wanted}, packages_distributions()
    missing = {
        name
        for name in imported()
        if not declared & {plain(each) for each in providers.get(name, [name])}
    }
    assert not missing


def test_all_that_is_declared_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {plain(line) for line in lines if re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)}
    extras = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + extras["serve"] + extras["dev"]
    assert {plain(each) for each in declared} - {"slipstream"} <= pinned


def test_what_is_installed_with_hashes_is_what_is_pinned():
    """All but torch, of which a CUDA build or a CPU build will do."""
    locked = (ROOT / "requirements.txt").read_text().replace("\\\n", "").splitlines()
    lines = [line.split() for line in locked if not line.startswith("#")]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    expected = [line for line in pinned if not line.startswith(("#", "torch=="))]
    assert [line[0] for line in lines] == expected
    hashes = [each for line in lines for each in line[1:]]
    assert all(line[1:] for line in lines)
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)


def test_the_installation_asks_for_the_hashes():
    assert "--require-hashes --requirement requirements.txt" in (ROOT / "Makefile").read_text()
