"""What users install: one import package, made of three folders that stay namespace-free."""

import ast
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import kvferry

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["kernels", "kvops", "connector"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling builds the wheel (requirements/build.lock)")
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield path.name, {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_pure_python_and_holds_one_top_level_name(wheel):
    name, files = wheel
    assert name == f"kvferry-{kvferry.__version__}-py3-none-any.whl"
    tops = {path.split("/")[0] for path in files}
    assert tops == {"kvferry", f"kvferry-{kvferry.__version__}.dist-info"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_wheel_holds_every_module_of_a_folder_once(wheel, folder):
    _, files = wheel
    in_tree = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    in_wheel = {path.removeprefix("kvferry/") for path in files if path.endswith(".py")}
    assert {path for path in in_wheel if path.split("/")[0] == folder} == in_tree


def test_the_wheel_ships_types_and_licence_and_no_byte_code(wheel):
    _, files = wheel
    assert "kvferry/py.typed" in files
    assert any(path.endswith("licenses/LICENSE") for path in files)
    assert not [path for path in files if path.endswith(".pyc")]


def test_the_wheel_ships_the_source_that_is_compiled_at_first_use(wheel):
    _, files = wheel
    sources = list((ROOT / "kernels").rglob("*.cu"))
    assert sources
    for source in sources:
        assert files[f"kvferry/{source.relative_to(ROOT)}"] == source.read_bytes()


def test_the_wheel_is_found_by_vllm_and_by_the_shell(wheel):
    _, files = wheel
    (entry_points,) = [text for path, text in files.items() if path.endswith("entry_points.txt")]
    lines = entry_points.decode().split("\n")
    assert lines[lines.index("[console_scripts]") + 1] == "kvferry = kvferry.cli:main"
    assert lines[lines.index("[vllm.general_plugins]") + 1] == "kvferry = kvferry.vllm:register"


def test_the_wheel_names_what_it_needs(wheel):
    _, files = wheel
    (text,) = [text for path, text in files.items() if path.endswith("dist-info/METADATA")]
    metadata = Parser().parsestr(text.decode())
    always = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line)[0] for line in always}
    assert names == {"numpy", "torch", "triton", "xxhash"}
    assert set(metadata.get_all("Provides-Extra")) == {"vllm", "cuda", "perf", "dev"}
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_no_top_level_package(folder):
    found = [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("__init__.py")]
    assert not found, (
        f"an __init__.py would make `import {folder}` find this folder before an installed package"
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_leads_to_its_folder(folder):
    link = ROOT / "src" / "kvferry" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / folder
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", [*FOLDERS, "src"])
def test_every_file_keeps_within_its_budget(folder):
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    too_long = {name: lines for name, lines in sizes.items() if lines > 400}
    assert not too_long, "a file has at most 400 lines: split it where a reader would look next"


@pytest.mark.parametrize("folder", [*FOLDERS, "src"])
def test_every_module_says_what_it_is(folder):
    silent = [
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_no_file_has_a_name_that_says_nothing():
    vague = {"utils", "common", "helpers", "base", "manager", "misc"}
    found = [
        str(path.relative_to(ROOT))
        for folder in [*FOLDERS, "src", "tests", "perf"]
        for path in (ROOT / folder).rglob("*.py")
        if path.stem in vague
    ]
    assert not found


def lock_lines(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    "name", ["library.lock", "vllm-cpu.lock", "build.lock", "test.lock", "dev.lock"]
)
def test_a_lock_file_names_exact_versions_in_order(name):
    lines = lock_lines(name)
    assert not [line for line in lines if not re.match(r"[A-Za-z0-9._-]+==[^\s;*]+(; .+)?$", line)]
    names = [re.split("==", line)[0].lower().replace("_", "-") for line in lines]
    assert names == sorted(names)


def test_the_lock_files_hold_what_the_package_needs():
    for name in ["library.lock", "vllm-cpu.lock"]:
        locked = {line.split("==")[0] for line in lock_lines(name)}
        # triton is the one that a machine without a GPU does without
        assert {"numpy", "torch", "xxhash"} <= locked
        assert not {"triton", "torchvision", "torchaudio", "torchcodec"} & locked


def test_the_tests_are_not_skipped_for_want_of_what_they_compile_with_or_talk_to():
    locked = {line.split("==")[0] for line in lock_lines("test.lock")}
    assert {"triton", "cuda-bindings", "nvidia-cuda-nvrtc", "vineyard-bdist"} <= locked
    # and the demo does not carry them
    assert not locked & {line.split("==")[0] for line in lock_lines("build.lock")}
