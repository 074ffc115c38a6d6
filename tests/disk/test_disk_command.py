"""`kvferry disk`: real folders, damage made on purpose, folders in use, and folders that are something else."""

import errno
import io
import json
import os
import subprocess
import sys

import pytest

from kvferry import cli
from kvferry.disk import progress, report, verify
from kvferry.disk.progress import Progress
from kvferry.kvops.store.disk import last_run
from kvferry.kvops.store.disk.files import BlobFiles
from kvferry.kvops.store.disk.format import namespace_tag
from kvferry.kvops.trace import Stages

from .blobs import NAMESPACE, OTHER, Owner, cut, everything, flip, made, segment

SIZE = 10_000
COUNT = 10


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def command(capsys):
    """Run `kvferry disk`; return exit code, stdout and stderr."""

    def run(*argv):
        code = cli.main(["disk", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def found(command):
    """Run `kvferry disk ... --json`; return exit code and values."""

    def run(*argv):
        code, out, _ = command(*argv, "--json")
        return code, json.loads(out)

    return run


# --- stats ----------------------------------------------------------------------------------------


def test_stats_of_a_folder_that_rests(folder, found):
    with Owner(folder) as owner:
        owner.save(range(COUNT), size=SIZE)
        owner.save(range(3), size=SIZE, namespace=OTHER)
    before = everything(folder)
    code, values = found("stats", folder)
    assert code == 0
    assert values["in_use_by"] is None
    assert values["quota_bytes"] is None
    assert values["last_run"] is None
    assert (values["blobs"], values["blob_bytes"]) == (13, 13 * SIZE)
    assert values["namespaces"] == [
        {
            "namespace": f"{namespace_tag(name):016x}",
            "blobs": count,
            "blob_bytes": count * SIZE,
        }
        for name, count in ((NAMESPACE, COUNT), (OTHER, 3))
    ]
    assert values["quarantine"] == {"slots": {}, "files": {}}
    assert 0 < values["used_bytes"] <= 64 << 20
    assert everything(folder) == before


def test_stats_beside_an_owner_that_lives_change_nothing(folder, found, command):
    with Owner(folder) as owner:
        owner.save(range(COUNT))
        before = everything(folder)
        code, values = found("stats", folder)
        assert everything(folder) == before
        assert (code, values["in_use_by"], values["blobs"]) == (0, os.getpid(), COUNT)
        code, text, _ = command("stats", folder)
        assert code == 0
        assert f"in use by process {os.getpid()}" in text
        # the owner goes on
        owner.save(range(COUNT, 2 * COUNT))
        assert found("stats", folder)[1]["blobs"] == 2 * COUNT


def test_stats_show_what_the_last_run_counted_and_timed(folder, found, command):
    made(folder)
    stages = Stages()
    for milliseconds in range(1, 101):
        stages.add("io", milliseconds / 1000)
    stages.add("checksum", 0.00002)
    last_run.write(folder, {"quota_bytes": 1 << 30, "saved": 7, "idle": 0}, stages.snapshot())
    code, values = found("stats", folder)
    assert code == 0
    assert values["quota_bytes"] == 1 << 30
    assert values["last_run"]["pid"] == os.getpid()
    assert values["last_run"]["stages"] == json.loads(json.dumps(stages.snapshot()))
    _, text, _ = command("stats", folder)
    lines = [line.split() for line in text.splitlines()]
    assert next(line[:3] for line in lines if line[:1] == ["quota"]) == ["quota", "1", "GiB,"]
    (io_line,) = [line for line in lines if line[:1] == ["io"]]
    assert io_line[1:4] == ["100", "50.5", "ms"]
    assert io_line[-2:] == ["5.05", "s"]
    assert ["saved", "7"] in lines
    assert not any("idle" in line for line in lines)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "stats": 3, "stages": {}}', "\xff"]
)
def test_statistics_that_make_no_sense_are_none(folder, found, text):
    made(folder)
    (folder / last_run.NAME).write_bytes(text.encode("latin-1"))
    code, values = found("stats", folder)
    assert (code, values["last_run"]) == (0, None)


def test_statistics_are_written_whole_or_not_at_all(folder, monkeypatch):
    made(folder)
    last_run.write(folder, {"saved": 1}, {})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(last_run.json, "dump", full)
    with pytest.raises(OSError, match="full"):
        last_run.write(folder, {"saved": 2}, {})
    assert last_run.read(folder).stats == {"saved": 1}
    assert not (folder / f"{last_run.NAME}.tmp").exists()


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_nothing_where_nothing_is(folder, found, command):
    made(folder)
    before = everything(folder)
    code, values = found("verify", folder)
    assert code == 0
    assert (values["checked"], values["checked_bytes"]) == (COUNT, COUNT * SIZE)
    assert (values["damaged"], values["files"], values["blobs"]) == ({}, {}, [])
    assert everything(folder) == before
    code, text, _ = command("verify", folder)
    assert code == 0
    assert "blobs: none; files: none" in text


def damage_every_way(folder):
    """Damage five of the blobs; return what verify should say of them."""
    places = made(folder)
    path = segment(folder, places[0])
    flip(path, places[1].offset + places[1].header_bytes + SIZE - 1)
    flip(path, places[2].offset + places[2].header_bytes)
    flip(path, places[3].offset + 30)
    with path.open("r+b") as stream:
        stream.seek(places[4].offset)
        stream.write(bytes(places[4].header_bytes))
        # a page of another blob, whole
        stream.seek(places[5].offset)
        page = stream.read(places[5].header_bytes + 12288)
        stream.seek(places[6].offset)
        stream.write(page)
    wrong = {1: "checksum", 2: "checksum", 3: "header", 4: "empty", 6: "stale"}
    return {places[number].slot: reason for number, reason in wrong.items()}


def test_verify_names_every_damaged_blob_and_quarantines_nothing(folder, found, command):
    wrong = damage_every_way(folder)
    before = everything(folder)
    code, values = found("verify", folder)
    assert code == 1
    assert everything(folder) == before
    assert values["damaged"] == {"checksum": 2, "header": 1, "empty": 1, "stale": 1}
    assert {blob["slot"]: blob["reason"] for blob in values["blobs"]} == wrong
    assert values["quarantined"] == values["changed"] == 0
    code, text, _ = command("verify", folder)
    assert code == 1
    for blob in values["blobs"]:
        assert f"{blob['tag']}  {blob['segment']} at {blob['offset']}  {blob['reason']}" in text
    assert f"kvferry disk verify --quarantine {folder}" in text


def test_verify_with_quarantine_puts_them_out_of_use(folder, found):
    wrong = damage_every_way(folder)
    code, values = found("verify", "--quarantine", folder)
    assert (code, values["quarantined"]) == (1, len(wrong))
    code, values = found("verify", folder)
    assert (code, values["checked"]) == (0, COUNT - len(wrong))
    reasons = {"checksum": 2, "header": 1, "empty": 1, "stale": 1}
    assert values["in_quarantine"] == reasons
    code, values = found("stats", folder)
    assert (values["blobs"], values["quarantine"]["slots"]) == (COUNT - len(wrong), reasons)


def test_a_segment_that_was_cut_off(folder, found):
    places = made(folder)
    cut(segment(folder, places[0]), 4096)
    before = everything(folder)
    code, values = found("verify", folder)
    assert (code, values["files"], values["checked"]) == (1, {"truncated": 1}, 0)
    assert everything(folder) == before
    assert found("stats", folder)[1]["unusable_files"] == 1
    # only as its owner is it moved away, and kept
    code, values = found("verify", "--quarantine", folder)
    assert (code, values["files"]) == (1, {"truncated": 1})
    assert found("stats", folder)[1]["quarantine"]["files"] == {"truncated": 1}
    assert found("verify", folder)[0] == 0


def test_a_torn_journal_is_told_and_is_no_damage(folder, found):
    made(folder)
    (journal,) = folder.glob("index-*.log")
    cut(journal, 10)
    code, values = found("verify", folder)
    assert code == 0
    assert values["discarded_records"] == 1
    assert values["checked"] == COUNT - 1


def test_verify_beside_an_owner_that_replaces_a_blob(folder, found, monkeypatch):
    monkeypatch.setattr(verify, "LOOK_AGAIN_AFTER_S", 0.0)
    with Owner(folder) as owner:
        (place,) = owner.save([1])
        real = BlobFiles.check
        replaced = []

        def check(self, entry):
            if not replaced:
                owner.remove([1])
                replaced.extend(owner.save([2]))
            return real(self, entry)

        monkeypatch.setattr(BlobFiles, "check", check)
        code, values = found("verify", folder)
        assert (replaced[0].segment, replaced[0].slot) == (place.segment, place.slot)
    assert (code, values["changed"], values["damaged"]) == (0, 1, {})
    assert values["in_use_by"] == os.getpid()


def test_verify_beside_an_owner_still_finds_damage(folder, found, monkeypatch):
    monkeypatch.setattr(verify, "LOOK_AGAIN_AFTER_S", 0.0)
    with Owner(folder) as owner:
        places = owner.save(range(3))
        flip(segment(folder, places[0]), places[0].offset + places[0].header_bytes)
        code, values = found("verify", folder)
    assert (code, values["damaged"], values["changed"]) == (1, {"checksum": 1}, 0)


def test_more_blobs_than_readers_are_ahead(folder, found):
    made(folder, range(200), size=4096)
    code, values = found("verify", folder)
    assert (code, values["checked"], values["checked_bytes"]) == (0, 200, 200 * 4096)


# --- gc -------------------------------------------------------------------------------------------


def test_gc_deletes_what_is_in_quarantine_and_dead_records(folder, found, command):
    wrong = damage_every_way(folder)
    found("verify", "--quarantine", folder)
    (folder / "quarantine").mkdir(exist_ok=True)
    (folder / "quarantine" / "seg-000000ff.blobs").write_bytes(bytes(8192))
    code, values = found("gc", folder)
    assert code == 0
    assert (values["slots"], values["files"]) == (len(wrong), 1)
    assert values["records"] > 0
    code, values = found("verify", folder)
    assert (code, values["checked"], values["in_quarantine"]) == (0, COUNT - len(wrong), {})
    code, text, _ = command("gc", folder)
    assert code == 0
    assert "0 slots back in use, 0 files deleted" in text


# --- wipe -----------------------------------------------------------------------------------------


def test_wipe_deletes_what_is_ours_and_nothing_else(folder, found):
    made(folder)
    last_run.write(folder, {}, {})
    (folder / "notes.txt").write_text("mine")
    code, values = found("wipe", "--yes", folder)
    assert code == 0
    assert values["wiped"]
    assert values["files"] == 3
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "notes.txt"]
    # and it is a folder of ours still
    code, values = found("stats", folder)
    assert (code, values["blobs"]) == (0, 0)


class Terminal(io.StringIO):
    """Somebody who is asked."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("answer", "code"), [("y\n", 0), (" YES \n", 0), ("n\n", 2), ("\n", 2), ("", 2)]
)
def test_wipe_asks(folder, command, monkeypatch, answer, code):
    made(folder)
    before = everything(folder)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ended, out, err = command("wipe", folder)
    assert ended == code
    assert f"Delete all blobs in {folder}" in err
    if code:
        assert "nothing deleted" in out
        assert everything(folder) == before
    else:
        assert not list(folder.glob("*.blobs"))


def test_wipe_without_anybody_to_ask(folder, command, monkeypatch):
    made(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, out, err = command("wipe", folder)
    assert (code, out) == (2, "")
    assert "--yes" in err
    assert list(folder.glob("*.blobs"))


# --- the wrong folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["verify", "--quarantine"], ["gc"], ["wipe", "--yes"]])
def test_a_folder_in_use_is_left_alone(folder, command, verb):
    with Owner(folder) as owner:
        owner.save(range(3))
        before = everything(folder)
        code, out, err = command(*verb, folder)
        assert (code, out) == (2, "")
        assert str(os.getpid()) in err
        assert everything(folder) == before


def missing(path):
    pass


def a_file(path):
    path.write_text("x")


def a_link(path):
    made(path.with_name("target"))
    path.symlink_to(path.with_name("target"))


def something_else(path):
    path.mkdir()
    (path / "index-1.log").write_text("a log of something else\n")
    (path / "seg-00000000.blobs").write_bytes(b"")
    (path / "lock").write_text("12345\n")


@pytest.mark.parametrize("kind", [missing, a_file, a_link, something_else])
@pytest.mark.parametrize("verb", [["stats"], ["verify"], ["gc"], ["wipe", "--yes"]])
def test_what_is_no_folder_of_the_tier_is_left_alone(folder, command, kind, verb):
    kind(folder)
    before = everything(folder.parent)
    code, out, err = command(*verb, folder)
    assert (code, out) == (2, "")
    assert err.startswith("kvferry: ")
    assert str(folder) in err
    assert everything(folder.parent) == before


def test_a_folder_of_a_later_version_is_not_touched_but_can_be_wiped(folder, command):
    made(folder)
    (journal,) = folder.glob("index-*.log")
    with journal.open("r+b") as stream:
        stream.seek(8)
        stream.write((99).to_bytes(4, "little"))
    before = everything(folder)
    for verb in ("stats", "verify", "gc"):
        code, out, err = command(verb, folder)
        assert (code, out) == (2, "")
        assert "later" in err
    assert everything(folder) == before
    assert command("wipe", "--yes", folder)[0] == 0


def test_where_the_folder_comes_from(folder, found, command, monkeypatch):
    made(folder)
    code, out, err = command("stats")
    assert (code, out) == (2, "")
    assert "KVFERRY_DISK_PATH" in err
    assert found("stats", "--path", folder)[1]["blobs"] == COUNT
    code, _, err = command("stats", folder, "--path", "/elsewhere")
    assert code == 2
    assert "/elsewhere" in err
    monkeypatch.setenv("KVFERRY_DISK_PATH", str(folder))
    assert found("stats")[1]["blobs"] == COUNT
    # one that is named wins
    assert command("stats", "/absent")[0] == 2


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["stats", "verify", "gc", "wipe"])
def test_every_verb_has_examples_and_says_its_exit_codes(command, verb):
    code, out, _ = command(verb, "--help")
    assert code == 0
    for text in ("examples:", f"kvferry disk {verb}", "exit codes:", "--json", "KVFERRY_DISK_PATH"):
        assert text in out


@pytest.mark.parametrize("argv", [[], ["dance"], ["stats", "--yes"], ["stats", "a", "b"]])
def test_usage_errors_are_two(command, argv):
    code, out, err = command(*argv)
    assert (code, out) == (2, "")
    assert "usage: kvferry" in err


def test_json_may_stand_before_the_verb(folder, command):
    made(folder)
    code, out, _ = command("--json", "stats", folder)
    assert code == 0
    assert json.loads(out)["blobs"] == COUNT


def test_no_torch_is_needed(folder):
    made(folder)
    script = (
        "import sys; from kvferry import cli\n"
        f"for verb in ('stats', 'verify', 'gc'): assert cli.main(['disk', verb, {str(folder)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


# --- progress -------------------------------------------------------------------------------------


class Clock:
    """A clock that goes forward only when it is told to."""

    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def test_nothing_is_shown_for_two_seconds():
    clock, out = Clock(), Terminal()
    shown = Progress("verifying", 100, stream=out, clock=clock)
    for number in range(19):
        clock.now = 50.0 + number / 10
        shown(number)
    shown.close()
    assert out.getvalue() == ""


def test_a_bar_on_a_terminal_is_taken_away_at_the_end(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    clock, out = Clock(), Terminal()
    shown = Progress("verifying", 4 << 30, is_bytes=True, stream=out, clock=clock)
    clock.now += 2.0
    shown(1 << 30)
    clock.now += 0.01
    shown(2 << 30)
    bar = f"verifying [{'#' * 6}{' ' * 18}]  25%  1 GiB of 4 GiB, 0.54 GB/s, 6 s left"
    assert out.getvalue() == f"\r\033[K{bar}"
    shown.close()
    assert out.getvalue() == f"\r\033[K{bar}\r\033[K"


def test_plain_lines_elsewhere():
    clock, out = Clock(), io.StringIO()
    shown = Progress("reading the journal", stream=out, clock=clock)
    for number in range(1, 14):
        clock.now += 1.0
        shown(number, 7200)
    assert out.getvalue().splitlines() == [
        "reading the journal   0%  2 of 7200, 2 h 0 min left",
        "reading the journal   0%  12 of 7200, 2 h 0 min left",
    ]
    shown.close()
    assert out.getvalue().count("\n") == 2


def test_how_much_is_not_known():
    clock, out = Clock(), io.StringIO()
    clock.now += 0
    shown = Progress("looking", stream=out, clock=clock)
    clock.now += progress.SHOW_AFTER_S
    shown(5)
    assert out.getvalue() == "looking: 5\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (2.5e-6, "2.5 us"), (0.0009999, "1 ms"), (0.5, "500 ms"), (1.0, "1 s"), (5000.0, "5000 s")],
)  # fmt: skip
def test_times_in_units_that_suit_them(seconds, text):
    assert report.seconds_text(seconds) == text
