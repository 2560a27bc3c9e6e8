"""The checks that need a GPU, where there is none: what they import and patch exists."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

GPU_TESTS = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("path", GPU_TESTS, ids=lambda path: path.stem)
def test_what_is_imported_and_patched_exists(path):
    module = importlib.import_module(f"tests.gpu.{path.stem}")
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "setattr":
            owner, *name = call.args[:-1]
            if not name:
                pkgutil.resolve_name(owner.value)
            elif hasattr(module, ast.unparse(owner)):
                assert hasattr(getattr(module, owner.id), name[0].value)
