"""Probes for memory: limits, room for the arena, huge pages, NUMA."""

import re
from collections.abc import Iterator
from pathlib import Path

from kvferry.kvops.config import GIB, Config, format_bytes

from .machine import Machine
from .report import Finding

_NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a huge number of bytes."""


def locked_memory(machine: Machine) -> Iterator[Finding]:
    """How much memory a process may lock."""
    limit = machine.memlock()
    no_limit = limit < 0 or limit >= _NO_LIMIT
    # only pinning for a GPU locks memory, and the CUDA driver is not bound by this limit
    advice = "" if no_limit else "Fine for kvferry; RDMA libraries need more: ulimit -l unlimited."
    value = "no limit" if no_limit else format_bytes(limit)
    yield Finding("memory", "memlock", value, advice=advice, data=None if no_limit else limit)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Size of the tmpfs for shared memory."""
    total, free = machine.disk(machine.shm)
    small = total < GIB
    yield Finding(
        "memory",
        "/dev/shm",
        f"{format_bytes(free)} of {format_bytes(total)} free",
        "warn" if small else "ok",
        "The arena lives here: start the container with a larger --shm-size." if small else "",
        {"total": total, "free": free},
    )


def available_memory(machine: Machine) -> Iterator[Finding]:
    """What control group and kernel leave us."""
    group = control_group(machine)
    if group is None:
        yield Finding("memory", "cgroup", "no memory limit")
    else:
        version, limit, used = group
        yield Finding(
            "memory",
            "cgroup",
            f"{format_bytes(used)} of {format_bytes(limit)} used (v{version})",
            data={"version": version, "max": limit, "current": used},
        )
    info = machine.meminfo()
    total, available = info.get("MemTotal"), info.get("MemAvailable")
    known = total is not None and available is not None
    value = f"{format_bytes(available or 0)} of {format_bytes(total or 0)}" if known else "unknown"
    yield Finding("memory", "available", value, data={"total": total, "available": available})


def room(machine: Machine, config: Config) -> Iterator[Finding]:
    """Whether the arena that is configured would fit here now."""
    folder, needed = machine.shm, config.arena_bytes
    if config.arena_path:
        path = machine.root / config.arena_path.lstrip("/")
        folder = path.parent
        if path.is_file():
            needed = max(0, needed - path.stat().st_blocks * 512)
    if not folder.is_dir():
        advice = f"Make the folder {folder}, or choose another arena_path."
        yield Finding("memory", "arena fits", f"no folder {folder}", "bad", advice)
        return
    rooms = {f"free on {folder}": machine.disk(folder)[1]}
    available = machine.meminfo().get("MemAvailable")
    if available is not None:
        rooms["memory available"] = available
    group = control_group(machine)
    if group is not None:
        rooms["left of the cgroup's memory limit"] = max(0, group[1] - group[2])
    name, least = min(rooms.items(), key=lambda item: item[1])
    value = f"{format_bytes(needed)} needed, {format_bytes(least)} {name}"
    data = {"needed": needed, **rooms}
    if needed > least:
        advice = (
            f"Set arena_bytes to less than {format_bytes(least)}, or give this machine or "
            "container more memory (docker: --shm-size, --memory)."
        )
        yield Finding("memory", "arena fits", value, "bad", advice, data)
    else:
        yield Finding("memory", "arena fits", value, data=data)
    kind = _file_system(machine, folder)
    if config.arena_path and kind not in (None, "tmpfs", "hugetlbfs"):
        advice = "Put arena_path on a tmpfs such as /dev/shm: elsewhere the disk slows every store."
        yield Finding("memory", "arena file system", f"{folder} is {kind}", "warn", advice, kind)


def huge_pages(machine: Machine) -> Iterator[Finding]:
    """Reserved and transparent huge pages."""
    info = machine.meminfo()
    size = info.get("Hugepagesize", 0)
    total, free = info.get("HugePages_Total", 0), info.get("HugePages_Free", 0)
    value = f"{free} of {total} free, {format_bytes(size)} each" if total else "none reserved"
    data = {"total": total, "free": free, "page_bytes": size}
    yield Finding("memory", "huge pages", value, data=data)
    base = "sys/kernel/mm/transparent_hugepage/"
    modes = {
        name: _chosen(machine.read(base + name)) for name in ("enabled", "shmem_enabled", "defrag")
    }
    shmem = modes["shmem_enabled"]
    level, advice = "ok", ""
    if shmem in ("never", "deny"):
        level = "warn"
        advice = (
            "Optional, fewer TLB misses in large arenas: as root, echo advise > "
            f"/{base}shmem_enabled (docker: on the host)."
        )
    elif shmem is None:
        advice = "This kernel has no transparent huge pages for shared memory."
    value = ", ".join(f"{name} {mode or 'unknown'}" for name, mode in modes.items())
    yield Finding("memory", "transparent huge pages", value, level, advice, modes)


def numa(machine: Machine) -> Iterator[Finding]:
    """Memory nodes."""
    nodes: list[tuple[int, str, int]] = []
    for folder in (machine.root / "sys/devices/system/node").glob("node[0-9]*"):
        where = folder.relative_to(machine.root)
        found = re.search(r"MemTotal:\s*(\d+) kB", machine.read(f"{where}/meminfo") or "")
        total = int(found[1]) * 1024 if found else 0
        nodes.append((int(folder.name[4:]), machine.read(f"{where}/cpulist") or "none", total))
    nodes.sort()
    value = "; ".join(f"node {n}: cpus {cpus}, {format_bytes(size)}" for n, cpus, size in nodes)
    data = [{"node": n, "cpus": cpus, "total_bytes": size} for n, cpus, size in nodes]
    advice = ""
    if len(nodes) > 1:
        advice = (
            "Keep engine and arena on one node: numactl --cpunodebind=N --membind=N vllm serve …"
        )
    yield Finding("memory", "numa", value or "unknown", advice=advice, data=data)


def control_group(machine: Machine) -> tuple[int, int, int] | None:
    """Return (cgroup version, limit, used) of the tightest memory limit over this process, in bytes.

    File cache that the kernel can drop at once does not count as used. None: there is no limit.
    """
    lines = [line.split(":", 2) for line in (machine.read("proc/self/cgroup") or "").splitlines()]
    found: list[tuple[int, int, int]] = []
    for line in lines:
        if len(line) != 3:
            continue
        _, controllers, path = line
        if "memory" in controllers.split(","):
            names = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _limits_up(machine, 1, path, names)
        elif not controllers:
            names = ("sys/fs/cgroup", "memory.max", "memory.current")
            found += _limits_up(machine, 2, path, names)
    return min(found, key=lambda item: item[1] - item[2], default=None)


def _limits_up(
    machine: Machine, version: int, path: str, names: tuple[str, str, str]
) -> Iterator[tuple[int, int, int]]:
    base, limit_name, used_name = names
    place = Path(path.strip("/"))
    if ".." in place.parts:
        # outside of what this container's view of the tree shows
        place = Path()
    for folder in [place, *place.parents]:
        limit = machine.read(f"{base}/{folder}/{limit_name}")
        used = machine.read(f"{base}/{folder}/{used_name}")
        if limit and used and limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            stat = machine.read(f"{base}/{folder}/memory.stat") or ""
            cache = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            yield version, int(limit), max(0, int(used) - (int(cache[1]) if cache else 0))


def _chosen(text: str | None) -> str | None:
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def _file_system(machine: Machine, folder: Path) -> str | None:
    place = "/" + str(folder.resolve().relative_to(machine.root.resolve()))
    best, kind = -1, None
    for line in (machine.read("proc/mounts") or "").splitlines():
        mount, kind_here = line.split()[1:3]
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:
            best, kind = len(mount), kind_here
    return kind
