"""The device check's frame: a section that dies, hangs or fails loses its own rest, and no row that was made."""

import csv
import time

import pytest
from perf.device import child, predictions, summary
from perf.device.machine import CpuMachine, describe
from perf.device.record import Case, DeviceLostError, Recorder, guarded
from perf.device.schedule import Runner, Section

# what the scheduler starts in these tests in place of perf.device.child: no torch, so it is there at once
PROGRAM = """
import os, signal, sys, threading
section, scratch = sys.argv[1], sys.argv[sys.argv.index("--attempted") + 1]
print("note: started", section)
seen = open(scratch).read().split() if os.path.exists(scratch) else []
if section != "useless":
    with open(scratch, "a") as stream:
        stream.write(f"start{len(seen)}\\n")
if section == "hangs":
    threading.Event().wait()
if section == "dies" and len(seen) == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit({"cut": 10 if len(seen) < 1 else 0, "lost": 11, "fails": 1, "useless": 1}.get(section, 0))
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    (tmp_path / "stand_in_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(budget_s=60.0, **options):
        return Runner(
            tmp_path / "device.csv", tmp_path / "log.txt", tmp_path, budget_s,
            program="stand_in_child", start_s=options.pop("start_s", 0.1), grace_s=0.2, **options,
        )  # fmt: skip

    return make


# a section for the real child: rows, a failure, and a process that is gone in the middle
SECTION = """
import os
from perf.device.record import Case

def row(context):
    context.recorder.row("copy", "somehow", us=[5.0], num_bytes=5000, match=True)

def cases(tiny):
    return [Case("row", 5000, "", row), Case("dies", 0, "", lambda _: os._exit(7)), Case("last", 5000, "", row)]
"""


def test_rows_before_and_after_a_death_are_kept(tmp_path, monkeypatch):
    (tmp_path / "stand_in_section.py").write_text(SECTION)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runner = Runner(
        tmp_path / "device.csv", tmp_path / "log.txt", tmp_path, 600.0, machine="CpuMachine",
        commit="abc", start_s=0.1,
    )  # fmt: skip
    (outcome,) = runner.run([Section("fragile", "stand_in_section", 500.0, "?")])
    assert (outcome.ended, outcome.starts) == ("all cases", 2)
    rows = summary.read(tmp_path / "device.csv")
    assert [(row["bench"], row["match"], row["commit"]) for row in rows] == [
        ("device_check fragile", "yes", "abc")
    ] * 2


def section(name, seconds=5.0):
    return Section(name, f"perf.device.{name}", seconds, "?")


def test_every_section_runs_whatever_becomes_of_the_others(runner, tmp_path):
    names = ["lost", "dies", "hangs", "fails", "useless", "good"]
    sections = [section(name, 1.0 if name == "hangs" else 5.0) for name in names]
    outcomes = {o.section.name: o for o in runner().run(sections)}
    assert {name: (o.ended, o.starts) for name, o in outcomes.items()} == {
        "lost": ("process ended: the device was lost", 4),
        "dies": ("all cases", 2),
        "hangs": ("process ended: killed 0.2 s after its time", 1),
        "fails": ("process ended: 1", 4),
        "useless": ("process ended: 1", 1),
        "good": ("all cases", 1),
    }
    assert outcomes["dies"].notes == ["started dies", "started dies"]
    assert "== good (start 1" in (tmp_path / "log.txt").read_text()


def test_a_section_that_was_cut_goes_on_when_time_is_left(runner):
    first, second = runner().run([section("cut"), section("good")])
    assert (first.ended, first.starts) == ("all cases", 2)
    assert second.ended == "all cases"


def test_no_process_is_started_without_the_time_for_it(runner):
    began = time.monotonic()
    (outcome,) = runner(budget_s=3.0, start_s=10.0).run([section("good")])
    assert outcome.ended == "not started: no time left"
    assert outcome.starts == 0
    assert time.monotonic() - began < 3.0


def recorder_of(tmp_path):
    return Recorder("link", describe(CpuMachine(), "abc"), tmp_path / "rows.csv")


def case(name, run=lambda context: None):
    return Case(name, 0, "", run)


def test_cases_that_were_attempted_are_not_run_again(tmp_path):
    attempted = tmp_path / "attempted"
    attempted.write_text("first\nsecond\n")
    ran = []
    cases = [
        case(name, lambda _, name=name: ran.append(name)) for name in ("first", "second", "third")
    ]
    context = child.Context(CpuMachine(), recorder_of(tmp_path), tiny=True)
    assert child.run_cases(cases, context, time.monotonic() + 60, attempted) == child.DONE
    assert ran == ["third"]
    assert attempted.read_text().split() == ["first", "second", "third"]


def test_no_case_starts_after_the_end(tmp_path, capsys):
    ran = []
    context = child.Context(CpuMachine(), recorder_of(tmp_path), tiny=True)
    cases = [case("only", lambda _: ran.append(1))]
    assert child.run_cases(cases, context, time.monotonic() - 1) == child.CUT
    assert not ran
    assert "note: link: out of time, 1 of 1 cases left" in capsys.readouterr().out


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(tmp_path):
    recorder = recorder_of(tmp_path)

    def fail(context):
        context.recorder.row(
            "half", "way", us=[2.0, 1.0, 3.0], num_bytes=4000, roof_gbps=4.0, match=True
        )
        raise ValueError("no such thing")

    context = child.Context(CpuMachine(), recorder, tiny=True)
    assert (
        child.run_cases([case("bad", fail), case("next")], context, time.monotonic() + 60)
        == child.DONE
    )
    with (tmp_path / "rows.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["case"], row["provider"], row["match"]) for row in rows] == [
        ("half", "way", "yes"), ("bad", "ValueError", "error"),
    ]  # fmt: skip
    assert float(rows[0]["p50_us"]) == 2.0
    assert float(rows[0]["gbps"]) == 2.0
    assert float(rows[0]["roof_pct"]) == 50.0
    assert rows[0]["commit"] == "abc"


def test_a_lost_device_ends_the_section(tmp_path):
    def lost():
        raise RuntimeError("an illegal memory access was encountered")

    recorder = recorder_of(tmp_path)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        guarded(case("bad"), None, recorder, lost)
    assert recorder.rows[0].match == "error"


def test_wrong_bytes_keep_no_figures(tmp_path):
    recorder = recorder_of(tmp_path)
    recorder.row("d2h 64 KiB", "S 8x16K", us=[1.0], num_bytes=100, roof_gbps=1.0, match=False)
    (row,) = recorder.rows
    assert (row.match, row.p50_us, row.gbps) == ("no", 0.0, 0.0)


def test_the_summary_holds_figures_against_predictions(tmp_path):
    recorder = recorder_of(tmp_path)
    for direction, gbps in (("h2d", 54.0), ("d2h", 20.0)):
        recorder.row(
            f"{direction} 256 MiB", "copy_engine", us=[1000 / gbps], num_bytes=1_000_000, match=True
        )
    text = summary.render(summary.read(tmp_path / "rows.csv"), [], 1.0)
    assert "| link | copy engine, host to device | 52 to 57 GB/s | 54 | as predicted |" in text
    assert (
        "| link | copy engine, device to host | 52 to 57 GB/s | 20 | **not as predicted** |" in text
    )
    assert "not measured" in text


def test_predictions_are_in_order_and_name_sections_that_exist():
    from perf.device.sections import SECTIONS

    names = [section.name for section in SECTIONS]
    used = [prediction.section for prediction in predictions.PREDICTIONS]
    assert used == sorted(used, key=names.index)
    assert all(prediction.low < prediction.high for prediction in predictions.PREDICTIONS)
