"""The static report: what CI compiles holds its rules, and the rules find what breaks them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", reason="the static report compiles with Triton (requirements/test.lock)"
)

from perf import static_report
from perf.models import MODELS
from perf.sass import Listing
from perf.static_report import Row, broken_rules, price_of_checksums, regressions
from perf.static_variants import MAX_CHECKSUM, Variant, variants

ROOT = Path(__file__).resolve().parents[2]

GOOD = Row("k", 90, "3.7.1", 40, 0, 0, 0, "4x128", "4x128", 16384, 16.0, 240)
RULES = Variant("k", None, {}, {}, 8)


def run(*arguments, timeout=300):
    command = [sys.executable, "-m", "perf.static_report", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.slow
def test_what_ci_compiles_keeps_the_rules(tmp_path, monkeypatch):
    # cold: neither Triton's cache nor the report's
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "rows"))
    done = run("--quick", "--arch", "90", "--assert", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(done.stdout)
    assert made["findings"] == []
    rows = {row["kernel"]: Row(**row) for row in made["rows"]}
    assert {"gather blocks, 16 KiB", "scatter blocks, 16 KiB, checksum"} <= set(rows)
    copy = rows["gather blocks, 16 KiB"]
    assert copy.loads == copy.stores == "4x128"
    assert copy.in_flight == 16384
    assert rows["gather blocks, 16 KiB, checksum"].per_vector > copy.per_vector > 1
    # the second run takes what the first has kept
    again = json.loads(run("--quick", "--arch", "90", "--json").stdout)
    assert again["rows"] == made["rows"]
    assert again["seconds"] < made["seconds"]


def test_a_dry_run_names_every_variant_and_architecture():
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for variant in variants():
        for arch in variant.architectures:
            assert f"{variant.name}, sm_{arch}" in lines
    assert "gather blocks, 16 KiB, gfx942" in lines


def test_nothing_to_compile_does_not_pass():
    for flags in (("--arch", "91"), ("--only", "nothing")):
        done = run("--assert", *flags)
        assert done.returncode == 2, done.stdout
        assert "got nothing" in done.stderr


def test_the_committed_table_has_every_variant_with_both_versions_of_triton():
    table = static_report.read_table(static_report.TABLE)
    for version in ("3.7.1", "3.6.0"):
        for variant in variants():
            for arch in variant.architectures:
                row = table[variant.name, arch, version]
                assert row.spills == row.local == 0


def test_the_models_are_those_that_the_report_promises():
    names = " ".join(model.name for model in MODELS)
    for wanted in (
        "llama-3.1-8b tp1",
        "llama-3.1-8b tp8",
        "llama-3.1-70b tp4",
        "qwen3-32b",
        "gemma-3",
        "gpt-oss",
    ):
        assert wanted in names
    pages = {page for model in MODELS for group in model.groups for page in group.page_bytes}
    # latents of 64 tokens: bf16, fp8_ds_mla, and the indexer of V3.2
    assert {64 * 1152, 64 * 656, 64 * 132} <= pages
    assert all(page % 16 == 0 for page in pages)
    assert any(group.block_size == 0 for model in MODELS for group in model.groups)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"spills": 8}, "8 bytes spilled"),
        ({"local": 16}, "16 of local memory"),
        ({"registers": 65}, "65 registers"),
        ({"loads": "1x64 3x128"}, "data loads 1x64 3x128"),
        ({"stores": "8x32"}, "data stores 8x32"),
        ({"stores": ""}, "data stores not found"),
    ],
)
def test_a_broken_rule_is_found(change, finding):
    assert broken_rules(RULES, GOOD, {}) == []
    (found,) = broken_rules(RULES, dataclasses.replace(GOOD, **change), {})
    assert finding in found


def test_a_checksum_that_costs_too_much_is_found():
    rules = dataclasses.replace(RULES, name="c", plain="k", usual=True)
    dear = dataclasses.replace(GOOD, kernel="c", per_vector=16.0 + MAX_CHECKSUM + 0.25)
    (found,) = broken_rules(rules, dear, {("k", 90): GOOD})
    assert "the checksum adds 7.25" in found
    cheap = dataclasses.replace(GOOD, kernel="c", per_vector=21.0)
    assert broken_rules(rules, cheap, {("k", 90): GOOD}) == []
    assert price_of_checksums([rules], {("c", 80): 0.33, ("c", 90): 0.36}) == []
    assert "36.0 %" in price_of_checksums([rules], {("c", 80): 0.35, ("c", 90): 0.37})[0]


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"registers": 41}, "41 registers; 40"),
        ({"shared": 1024}, "1024 shared; 0"),
        ({"per_vector": 17.0}, "17.0 instructions"),
        ({"in_flight": 8192}, "8192 bytes in flight"),
    ],
)
def test_a_regression_is_found(change, finding):
    assert regressions(GOOD, GOOD) == []
    assert regressions(dataclasses.replace(GOOD, per_vector=16.5, registers=39), GOOD) == []
    (found,) = regressions(dataclasses.replace(GOOD, **change), GOOD)
    assert finding in found
    assert "not in static.csv" in regressions(GOOD, None)[0]


LISTING = """
.text.kernel:
        /*0000*/                   LDG.E.64 R2, desc[UR4][R8.64] ;
.L_x_1:
        /*0010*/                   LDG.E.EF.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.EF.128 R12, desc[UR4][R2.64+0x800] ;
        /*0030*/                   IADD3 R20, R20, 0x1, RZ ;
        /*0040*/                   STG.E.EF.128 desc[UR4][R10.64], R4 ;
        /*0050*/              @!P0 STG.E.EF.128 desc[UR4][R10.64+0x800], R12 ;
        /*0060*/                   STG.E desc[UR4][R22.64], R20 ;
        /*0070*/              @!P1 BRA `(.L_x_1) ;
        /*0080*/                   STL [R1], R4 ;
        /*0090*/                   EXIT ;
.L_x_2:
        /*00a0*/                   BRA `(.L_x_2);
"""


def test_machine_code_is_read():
    listing = Listing.parse(LISTING)
    assert len(listing.instructions) == 11
    assert listing.widths("LDG") == {128: 2}
    assert listing.widths("STG") == {128: 2}
    assert listing.data_loop() == (7, 32)
    assert listing.bytes_in_flight() == 32
    assert listing.count("LDL", "STL") == 1


def test_a_use_in_between_ends_what_is_in_flight():
    text = LISTING.replace("IADD3 R20, R20, 0x1, RZ", "IADD3 R20, R5, 0x1, RZ")
    assert Listing.parse(text).bytes_in_flight() == 32
    lines = text.splitlines()
    use = next(i for i, line in enumerate(lines) if "IADD3" in line)
    lines[use - 1], lines[use] = lines[use], lines[use - 1]
    assert Listing.parse("\n".join(lines)).bytes_in_flight() == 16
