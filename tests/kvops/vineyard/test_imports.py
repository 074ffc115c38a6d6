"""The client needs the standard library only; the messages do no input or output."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "kvops" / "vineyard"
PURE = ["framing", "fields", "ids", "status", "payload", "codec", "wire"]
PURE += [path.stem for path in FOLDER.glob("*_messages.py")]


def test_the_client_loads_nothing_heavy():
    script = (
        "import sys\n"
        "import kvferry.kvops.vineyard.client\n"
        "outside = {name.split('.')[0] for name in sys.modules} - {*sys.stdlib_module_names, '__main__', 'kvferry'}\n"
        "print(sorted(name for name in outside if not name.startswith('_')))\n"
    )
    command = [sys.executable, "-S", "-c", script]
    environment = {"PYTHONPATH": str(FOLDER.parents[1] / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("module", PURE)
def test_messages_do_no_input_or_output(module):
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"os", "socket", "mmap", "select", "threading", "pathlib", "fds"}
