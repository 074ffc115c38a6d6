"""The bulk copy kernels as compiled: what static proof there is of them, wherever NVRTC is installed."""

import pytest
from perf import bulk_cubin
from perf.bulk_cubin import ARCHITECTURES, Report

from kvferry.kernels import bulk

FIRST_BATCH = "LDG.E.CONSTANT R8, desc[UR8][R6.64] ;" + "\n NOP ;" * 16
GOOD = f"""\
{FIRST_BATCH}
.L_x_2:
        /*0010*/               IADD3 R2, R8, R9, RZ ;
        /*0020*/               LDG.E.CONSTANT R8, desc[UR8][R6.64] ;
        /*0030*/               LDG.E.64.CONSTANT R12, desc[UR8][R14.64] ;
        /*0040*/               MOV R14, RZ ;
.L_x_3:
        /*0050*/               UBLKCP.S.G [UR14], [UR12], UR4 ;
        /*0060*/               @P1 BRA `(.L_x_3) ;
        /*0070*/               @P3 BRA `(.L_x_2) ;
        /*0080*/               MOV R8, RZ ;
"""


@pytest.fixture(scope="module")
def reports():
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings calls NVRTC")
    pytest.importorskip("triton", reason="Triton brings the tools that read a cubin")
    try:
        bulk.cubin(ARCHITECTURES[0])
    except RuntimeError as error:
        if "refused" in str(error):
            raise
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return [report for name in ARCHITECTURES for report in bulk_cubin.reports(name)]


def test_no_kernel_spills_and_all_move_by_bulk_copies(reports):
    assert len(reports) == 2 * len(ARCHITECTURES)
    assert [report.problems() for report in reports] == [[]] * len(reports)


def test_each_shortcoming_is_a_problem():
    good = Report("sm_90", "kernel", 39, 0, 0, 1, 2, ())
    assert good.problems() == []
    for change, problem in [
        ({"registers": 65}, "65 registers"),
        ({"local_bytes": 16}, "16 bytes of local memory"),
        ({"local_accesses": 1}, "1 local accesses"),
        ({"bulk_loads": 0}, "0 bulk loads"),
        ({"bulk_stores": 0}, "0 bulk stores"),
        ({"waits_early": ("R9", "R13")}, "R9, R13 touched too early"),
    ]:
        assert Report(**(vars(good) | change)).problems() == [problem]


@pytest.mark.parametrize(
    ("old", "new", "touched"),
    [
        ("", "", []),
        ("MOV R14, RZ", "VOTE.ANY R13, PT, P0", ["R13"]),
        (
            "UBLKCP.S.G [UR14], [UR12], UR4",
            "IADD3 R1, R8, RZ ;\n UBLKCP.S.G [UR14], [UR12]",
            ["R8"],
        ),
    ],
)
def test_a_look_up_that_would_be_waited_for_is_noticed(old, new, touched):
    lines = GOOD.replace(old, new).splitlines() if old else GOOD.splitlines()
    assert bulk_cubin._touched_early(lines) == touched
