"""bulk.cu itself, compiled for the host: the ring, the tables and the tails, against a late copy engine."""

import re
import shutil

import pytest
import torch

from kvferry.kernels import bulk
from kvferry.kernels.table import HOLE

from .bulk_model import TILE, Job, build

PENDING = {True: bulk.GATHER_PENDING, False: bulk.SCATTER_PENDING}

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the model of the ring is compiled by g++"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build(tmp_path_factory.mktemp("ring"), bulk.source())


JOBS = {
    "one tile": ([[512]], [1]),
    "tails of 16 bytes": ([[TILE + 16, 2 * TILE, 16, 3 * TILE - 16]], [5]),
    "latents of 576 and 656 bytes a token": ([[16 * 576, 16 * 656]], [4]),
    "groups of several sizes, one of them idle": ([[3 * TILE, 528], [16], [5 * TILE]], [4, 0, 3]),
    "more than one batch of 32 units": ([[20 * TILE, 7 * TILE + 48]], [5]),
}
CASES = [pytest.param(*job, id=name) for name, job in JOBS.items()]


@pytest.mark.parametrize(("groups", "counts"), CASES)
@pytest.mark.parametrize("is_gather", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize(("extra_stages", "grid"), [(1, 1), (2, 3), (9, 1), (9, 2)])
def test_the_ring_moves_the_bytes_whenever_copies_land(
    model, groups, counts, is_gather, extra_stages, grid
):
    stages = PENDING[is_gather] + extra_stages
    for seed in range(6):
        job = Job(groups, counts, seed)
        expected = job.expected(is_gather)

        problems, loaded, under_way = job.run(model, is_gather, stages=stages, grid=grid, seed=seed)

        assert problems == 0
        for mine, theirs in zip(job.everything(), expected, strict=True):
            assert torch.equal(mine, theirs)
        assert loaded == job.sizes[job.ids != HOLE].sum()
        assert under_way <= extra_stages * TILE


def test_the_ring_fills_up_to_its_budget(model):
    job = Job([[64 * TILE]], [2], holes=0)
    _, _, most = job.run(model, False, stages=12, grid=1)
    assert most == (12 - bulk.SCATTER_PENDING) * TILE


@pytest.mark.parametrize("is_gather", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize(("counts", "holes"), [([0, 0], 0), ([4, 3], 1)], ids=["none", "holes"])
def test_nothing_to_move_loads_nothing(model, counts, holes, is_gather):
    job = Job([[TILE], [TILE + 16]], counts, holes=holes)
    before = job.everything()
    assert job.run(model, is_gather, stages=8, grid=2) == (0, 0, 0)
    for mine, theirs in zip(job.everything(), before, strict=True):
        assert torch.equal(mine, theirs)


MUTANTS = {
    "a stage is reused one store too early": (
        "if (under_way == num_stages - PENDING)", "if (under_way == num_stages - PENDING + 1)",
    ),
    "stores are not waited for before their stage is reused": (
        "if (is_wrapped) bulk_wait_read<PENDING>();", "",
    ),
    "the parity never flips": ("parity ^= 1;", ""),
    "the last stores are left to themselves": ("    bulk_wait();\n", ""),
    "the last loads are left to themselves": ("while (ring.under_way) ring.drain();", ""),
    "barriers are not published": ("barrier_publish();\n  }", "}"),
    "every group starts at the first tile": ("row.first_tile + (unit", "0 + (unit"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_catches_a_broken_ring(tmp_path, name):
    old, new = MUTANTS[name]
    text = bulk.source()
    assert text.count(old) == 1
    broken = build(tmp_path, text.replace(old, new))
    caught = False
    for seed in range(40):
        job = Job(*JOBS["groups of several sizes, one of them idle"], seed, holes=0)
        expected = job.expected(True)
        problems, _, _ = job.run(broken, True, stages=6, grid=1, seed=seed)
        moved = zip(job.everything(), expected, strict=True)
        caught |= bool(problems) or not all(torch.equal(a, b) for a, b in moved)
        if caught:
            break
    assert caught


def test_the_launcher_and_the_kernel_agree_on_their_numbers(model):
    numbers = dict(re.findall(r"#define (MAX_STAGES|MAX_GROUPS|\w+_PENDING) (\d+)", bulk.source()))
    assert {name: int(value) for name, value in numbers.items()} == {
        "MAX_STAGES": bulk.MAX_STAGES,
        "MAX_GROUPS": bulk.MAX_GROUPS,
        "GATHER_PENDING": bulk.GATHER_PENDING,
        "SCATTER_PENDING": bulk.SCATTER_PENDING,
    }
    assert model.control_bytes() == bulk.CONTROL_BYTES
