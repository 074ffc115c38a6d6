"""Imports flow one way: connector -> kvops -> kernels; and only the connector knows vLLM."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BELOW = {"kernels": set(), "kvops": {"kernels"}, "connector": {"kernels", "kvops"}}
# folders inside kvops that must not know each other: (folder, what it may not import)
STRANGERS = [("kvops/transfer", "kvferry.kvops.store"), ("kvops/store", "kvferry.kvops.transfer")]


def modules_imported_by(source):
    """Absolute names a file imports; relative ones are resolved from its place in the package."""
    found = set()
    package = ("kvferry", *source.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            prefix = ".".join(part for part in (start, node.module) if part)
            found |= {f"{prefix}.{alias.name}" for alias in node.names}
    return found


def layers_imported_by(source):
    names = {name for name in modules_imported_by(source) if name.startswith("kvferry.")}
    return {name.split(".")[1] for name in names} & BELOW.keys()


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_what_lies_below(layer):
    wrong = {
        str(source.relative_to(ROOT)): sorted(above)
        for source in (ROOT / layer).rglob("*.py")
        if (above := layers_imported_by(source) - BELOW[layer] - {layer})
    }
    assert not wrong


@pytest.mark.parametrize("layer", ["kernels", "kvops"])
def test_vllm_is_unknown_below_the_connector(layer):
    wrong = [
        str(source.relative_to(ROOT))
        for source in (ROOT / layer).rglob("*.py")
        if any(name.split(".")[0] == "vllm" for name in modules_imported_by(source))
    ]
    assert not wrong


@pytest.mark.parametrize(("folder", "stranger"), STRANGERS)
def test_transfers_and_the_store_do_not_know_each_other(folder, stranger):
    wrong = [
        str(source.relative_to(ROOT))
        for source in (ROOT / folder).rglob("*.py")
        if any(f"{name}.".startswith(f"{stranger}.") for name in modules_imported_by(source))
    ]
    assert not wrong
