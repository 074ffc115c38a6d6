"""What the documents say is so: settings, public names, commands, files."""

import json
import re
import shlex
from pathlib import Path

import pytest

import kvferry

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(path.name for path in ROOT.glob("*.md"))


def code_blocks(text, language):
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for named, body in fences if named == language]


def test_the_settings_table_is_the_dataclass():
    config = pytest.importorskip("kvferry.kvops.config", exc_type=ImportError)
    start, end = "by tests/test_docs_examples.py -->\n", "<!-- end of settings -->"
    table = README.split(start)[1].split(end)[0]
    assert table == config.markdown_table(), "put the output of markdown_table() into README.md"


def test_every_public_name_is_in_the_docstring_and_leads_somewhere():
    documented = set()
    for line in kvferry.__doc__.split("Public names:")[1].splitlines():
        documented |= set(re.findall(r"``(\w+)``", line.split(": ")[0] + ":"))
    assert documented == set(kvferry.__all__)
    for name in kvferry.__all__:
        assert getattr(kvferry, name) is not None
    assert sorted(kvferry.__all__) == list(kvferry.__all__)


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        kvferry.no_such_name  # noqa: B018


def test_the_serve_command_is_one_command_with_a_valid_config():
    (serve,) = [block for block in code_blocks(README, "sh") if "--kv-transfer-config" in block]
    words = shlex.split(serve)
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "KVFerryConnector"
    assert transfer["kv_connector_module_path"] == "kvferry.vllm"
    assert transfer["kv_role"] == "kv_both"
    config = pytest.importorskip("kvferry.kvops.config", exc_type=ImportError)
    assert config.Config.read(transfer["kv_connector_extra_config"], environ={})


def test_the_python_examples_run():
    (example,) = code_blocks(README, "python")
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_is_named_exists(document):
    targets = set(
        re.findall(r"^([a-z]+(?: [a-z]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    known = {name for line in targets for name in line.split()}
    text = (ROOT / document).read_text()
    spans = re.findall(r"`(make [^`\n]+)`", text) + re.findall(r"^(make .*)$", text, re.MULTILINE)
    for span in spans:
        for word in span.split("#")[0].split()[1:]:
            if "=" in word:
                break
            assert word in known, f"{document}: {span}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document):
    text = (ROOT / document).read_text()
    spans = re.findall(r"`([\w.-]+(?:/[\w.-]+)*(?:\.(?:md|py|lock|txt|toml)|/))`", text)
    missing = [span for span in spans if span != "__init__.py" and not (ROOT / span).exists()]
    assert not missing


def test_the_tree_names_folders_that_are_there():
    (tree,) = [block for block in code_blocks(README, "") if block.startswith("kernels/")]
    parent = ""
    for line in tree.splitlines():
        name = line.split()[0]
        parent = name if not line.startswith(" ") else parent
        path = ROOT / (name if not line.startswith(" ") else parent + name)
        assert path.exists(), line


def test_the_versions_of_vllm_that_are_promised_are_the_ones_asked_for():
    low, high = re.search(r"vLLM (\d\.\d+) to (\d\.\d+)", README).groups()
    above = "0." + str(int(high.split(".")[1]) + 1)
    wanted = f"vllm>={low},<{above}"
    assert f'"{wanted}"' in (ROOT / "pyproject.toml").read_text()
    assert wanted in (ROOT / "requirements" / "vllm-gpu.txt").read_text().splitlines()
    assert f"`{wanted}`" in README
