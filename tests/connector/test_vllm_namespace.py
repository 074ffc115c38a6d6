"""Every single thing that has to agree, changed one at a time: another namespace each."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvferry.connector.geometry import read_geometry
from kvferry.connector.vllm_namespace import fresh_epoch, namespace_fields
from kvferry.kvops.namespace import namespace_digest

pytestmark = pytest.mark.vllm

LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]


class HfConfig:
    def __init__(self, **values):
        self.values = values

    def to_dict(self):
        return dict(self.values)


def known_fields(of, **values):
    """Return those of *values* that a dataclass of this vLLM has."""
    names = {field.name for field in dataclasses.fields(of)}
    return {name: value for name, value in values.items() if name in names}


@pytest.fixture
def world(tmp_path):
    """Return what vLLM hands over for a small model, as attributes that a test may change."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"a": 1}')
    (model / "model.safetensors").write_bytes(b"weights")
    full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64
    )
    page = full.page_size_bytes
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model), revision=None, dtype=torch.bfloat16, quantization=None,
            hf_config=HfConfig(hidden_size=256, rope_scaling=None, transformers_version="5", _name_or_path="x"),
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", kv_cache_layout="LBHNC", kv_cache_dtype_skip_layers=[],
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1,
            decode_context_parallel_size=1, world_size=1,
        ),
        attention_config=SimpleNamespace(),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        lora_config=None,
    )  # fmt: skip
    kv_cache_config = KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[
            KVCacheTensor(size=20 * page, layers=LAYERS, layer_stride=10 * page, block_stride=page)
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(LAYERS, full),
            KVCacheGroupSpec(["model.layers.2.attn"], window),
        ],
        **known_fields(KVCacheConfig, kv_cache_layout="LBHNC", hash_block_size=32),
    )
    return SimpleNamespace(vllm=vllm_config, kv=kv_cache_config, blocks_per_chunk=2, folder=model)


def digest(world):
    blocks = [group.kv_cache_spec.block_size for group in world.kv.kv_cache_groups]
    geometry = read_geometry(world.vllm, world.kv, world.blocks_per_chunk, blocks)
    return namespace_digest(namespace_fields(world.vllm, world.kv, geometry))


def put(path, value):
    """Return a change that sets an attribute, given as a path from the world."""

    def change(world):
        *parents, last = path.split(".")
        target = world
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)

    return change


def respec(group, **changes):
    def change(world):
        spec = world.kv.kv_cache_groups[group].kv_cache_spec
        world.kv.kv_cache_groups[group].kv_cache_spec = dataclasses.replace(spec, **changes)

    return change


def hf(**values):
    return lambda world: world.vllm.model_config.hf_config.values.update(values)


def to_mla(world):
    world.kv.kv_cache_groups[0].kv_cache_spec = MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=576, head_size_v=0, dtype=torch.bfloat16
    )


def swap_groups(world):
    world.kv.kv_cache_groups.reverse()


def swap_layers(world):
    world.kv.kv_cache_groups[0].layer_names = LAYERS[::-1]


FLIPS = {
    "model name": put("vllm.model_config.model", "org/other"),
    "model dtype": put("vllm.model_config.dtype", torch.float16),
    "quantization": put("vllm.model_config.quantization", "fp8"),
    "rope scaling override": hf(rope_scaling={"factor": 2.0}),
    "hidden size": hf(hidden_size=512),
    "weights": lambda world: (world.folder / "model.safetensors").write_bytes(b"weights!"),
    "made-up weights": put("vllm.load_config.load_format", "dummy"),
    "loader's own settings": put("vllm.load_config.model_loader_extra_config", {"a": 1}),
    "weights elsewhere": put("vllm.model_config.model_weights", "s3://bucket/model"),
    "model config file": lambda world: (world.folder / "config.json").write_text('{"a": 2}'),
    "kv dtype": put("vllm.cache_config.cache_dtype", "fp8"),
    "layers left out of kv dtype": put("vllm.cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "hash algorithm": put("vllm.cache_config.prefix_caching_hash_algo", "xxhash"),
    "hash block": put("kv.hash_block_size", 16),
    "layout": put("kv.kv_cache_layout", "BLHNC"),
    "attention backend": put("vllm.attention_config.backend", "FLASH_ATTN"),
    "blocks per chunk": put("blocks_per_chunk", 4),
    "tensor parallel": put("vllm.parallel_config.tensor_parallel_size", 2),
    "pipeline parallel": put("vllm.parallel_config.pipeline_parallel_size", 2),
    "prefill context parallel": put("vllm.parallel_config.prefill_context_parallel_size", 2),
    "decode context parallel": put("vllm.parallel_config.decode_context_parallel_size", 2),
    "world size": put("vllm.parallel_config.world_size", 2),
    "block size": respec(0, block_size=64),
    "kv heads": respec(0, num_kv_heads=4),
    "head size": respec(0, head_size=128),
    "page padding": respec(0, page_size_padded=1 << 20),
    "page dtype": respec(0, dtype=torch.float16),
    "window": respec(1, sliding_window=128),
    "kind of attention": to_mla,
    "order of groups": swap_groups,
    "order of layers": swap_layers,
    "a LoRA engine": put("vllm.lora_config", object()),
}


@pytest.mark.parametrize("change", FLIPS.values(), ids=FLIPS.keys())
def test_one_difference_is_another_namespace(world, change):
    before = digest(world)
    if change is FLIPS["attention backend"]:
        world.vllm.attention_config = type(
            "AttentionConfig", (), {"__str__": lambda self: "backend=FLASH_ATTN"}
        )()
    else:
        change(world)
    assert digest(world) != before


def test_the_revision_of_a_hub_model_counts(world):
    world.vllm.model_config.model = "org/name"
    before = digest(world)
    world.vllm.model_config.revision = "v2"
    assert digest(world) != before


def test_the_seed_of_block_hashes_counts(world, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = digest(world)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert digest(world) != before


def test_the_version_of_the_engine_counts(world, monkeypatch):
    from kvferry.connector import compat

    before = digest(world)
    monkeypatch.setattr(compat, "engine_version", lambda: "0.99.0")
    assert digest(world) != before


def test_what_computes_the_same_has_the_same_name(world):
    before = digest(world)
    world.vllm.model_config.hf_config.values.update(
        transformers_version="6", _name_or_path="elsewhere"
    )
    world.kv = copy.deepcopy(world.kv)
    world.kv.num_blocks = 99
    assert digest(world) == before


def test_two_engines_with_lora_never_share(world):
    world.vllm.lora_config = object()
    assert digest(world) != digest(world)


def test_an_epoch_is_never_met_again(world):
    fields = {"a": 1}
    assert (
        len(
            {namespace_digest(fresh_epoch(fields)) for _ in range(100)} | {namespace_digest(fields)}
        )
        == 101
    )


class TestGeometry:
    def read(self, world):
        blocks = [group.kv_cache_spec.block_size for group in world.kv.kv_cache_groups]
        return read_geometry(world.vllm, world.kv, world.blocks_per_chunk, blocks)

    def test_pages_of_all_layers_of_a_group_add_up(self, world):
        geometry = self.read(world)
        page = 2 * 32 * 128 * 2
        assert geometry.page_bytes == (2 * page, page)
        assert geometry.part_bytes == (4 * page, 2 * page)
        assert geometry.tokens_per_chunk == (64, 64)
        assert geometry.is_prefix == (True, False)
        assert not geometry.is_single_group

    def test_a_block_major_cache_is_taken_whole(self, world):
        page = 2 * 32 * 128 * 2
        world.kv.kv_cache_tensors = [
            KVCacheTensor(size=30 * page, layers=LAYERS, layer_stride=page, block_stride=3 * page)
        ]
        assert self.read(world).page_bytes == (3 * page, 3 * page)

    def test_a_part_is_padded_to_a_cache_line(self, world):
        respec(0, head_size=1, num_kv_heads=1)(world)
        world.kv.kv_cache_groups[0].layer_names = LAYERS[:1]
        assert self.read(world).part_bytes[0] % 64 == 0
