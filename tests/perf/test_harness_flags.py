"""Flags that are wrong are refused before anything is timed."""

import pytest
from perf import harness

NAMES = ("plain", "ours")


def bench(*flags):
    ran = []
    providers = [harness.Provider(name, lambda name=name: ran.append(name)) for name in NAMES]
    case = harness.Case("one", 1, 1, providers)
    args = harness.parser("bench_none", "").parse_args(flags)
    return harness.run("bench_none", args, [case], lambda figures: []), ran


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--providers", "ours,theirs"), "--providers must be among plain, ours; got theirs"),
        (("--rounds", "0"), "--rounds must be at least 1; got 0"),
        (("--rounds", "-3", "--dry-run"), "--rounds must be at least 1; got -3"),
        (("--csv", "{}"), "--csv must be a file that can be written; got"),
        (("--csv", "{}/file/in.csv"), "--csv must be a file that can be written; got"),
    ],
)
def test_wrong_flags_are_refused_at_once(flags, message, tmp_path, capsys):
    (tmp_path / "file").touch()
    status, ran = bench(*(flag.format(tmp_path) for flag in flags))
    assert (status, ran) == (2, [])
    assert message in capsys.readouterr().err


def test_a_new_file_has_one_header(tmp_path):
    path = tmp_path / "folder" / "rows.csv"
    for _ in range(2):
        status, ran = bench("--csv", str(path), "--rounds", "1", "--providers", "ours")
        assert status == 0
        assert {*ran} == {*NAMES}
    lines = path.read_text().splitlines()
    assert "provider" in lines[0]
    assert (len(lines), lines.count(lines[0])) == (5, 1)
