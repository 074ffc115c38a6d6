"""Namespaces: one name for the same things, another for anything else."""

import enum
import json
import os

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.kvops.namespace import describe, model_identity, namespace_digest

# a busy machine is no failure
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=5)


@PATIENT
@given(FIELDS)
def test_order_does_not_matter(fields):
    turned = dict(reversed(list(fields.items())))
    assert namespace_digest(fields) == namespace_digest(turned)
    assert len(namespace_digest(fields)) == 16
    assert json.loads(describe(fields)) == fields
    assert describe(fields).isascii()


@PATIENT
@given(FIELDS, FIELDS)
def test_different_text_means_a_different_name(one, other):
    same_text = describe(one) == describe(other)
    assert (namespace_digest(one) == namespace_digest(other)) == same_text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": "1"}),
        ({"a": None}, {"a": "null"}),
        ({"a": None}, {"a": False}),
        ({"a": []}, {"a": {}}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({"a": "bf16"}, {"a": "fp8"}),
    ],
)
def test_near_things_have_different_names(one, other):
    assert namespace_digest(one) != namespace_digest(other)


def test_the_digest_never_changes():
    # an arena written by an older version must still be found: changing this breaks restarts
    fields = {"dtype": "bf16", "block_size": 16}
    assert namespace_digest(fields).hex() == "695a69038651c9fa48213efdabb80ee2"


def test_tuples_are_lists():
    assert namespace_digest({"a": (1, (2,))}) == namespace_digest({"a": [1, [2]]})


class Word(str, enum.Enum):
    A = "a"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({}, "at least one"),
        ({"a": float("nan")}, "fields.a must be a JSON value"),
        ({"a": float("inf")}, "fields.a must be a JSON value"),
        ({"a": b"x"}, "fields.a must be a JSON value"),
        ({"a": {1, 2}}, "fields.a must be a JSON value"),
        ({"a": [1, {"b": object()}]}, "fields.a[1].b must be a JSON value"),
        ({1: 2}, "fields must have text keys; got 1"),
        ({"a": {None: 1}}, "fields.a must have text keys"),
        ({"a": numpy.int64(3)}, "(a int64)"),
        ({"a": numpy.float64(3)}, "(a float64)"),
        ({"a": Word.A}, "(a Word)"),
    ],
    ids=repr,
)
def test_refuses_what_json_cannot_say(fields, where):
    with pytest.raises(ValueError, match="must") as caught:
        namespace_digest(fields)
    assert where in str(caught.value)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model-1.safetensors").write_bytes(b"\1" * 100)
    (folder / "model-2.safetensors").write_bytes(b"\2" * 100)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_local_model_is_its_config_and_weight_files(model):
    identity = model_identity(str(model), None)
    describe(identity)
    assert [file[0] for file in identity["files"]] == ["model-1.safetensors", "model-2.safetensors"]
    renamed = model.rename(model.with_name("renamed"))
    assert model_identity(str(renamed), None) == identity


@pytest.mark.parametrize("change", ["config", "size", "time", "name", "more", "less", "code"])
def test_any_change_of_a_local_model_is_another_identity(model, change):
    before = model_identity(str(model), None)
    weights = model / "model-1.safetensors"
    stat = weights.stat()
    if change == "config":
        (model / "config.json").write_text('{"hidden_size": 65}')
    elif change == "size":
        weights.write_bytes(b"\1" * 101)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "time":
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif change == "name":
        weights.rename(model / "model-3.safetensors")
    elif change == "more":
        (model / "extra.bin").write_bytes(b"")
    elif change == "less":
        weights.unlink()
    else:
        (model / "modeling_own.py").write_text("")
    assert model_identity(str(model), None) != before


def test_a_single_file_and_a_folder_without_weights(model, tmp_path):
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    assert [file[0] for file in model_identity(str(gguf), None)["files"]] == ["tiny.gguf"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert model_identity(str(tmp_path / "a"), None) != model_identity(str(tmp_path / "b"), None)


def test_a_name_is_itself_its_revision_and_the_commit_it_stands_for(tmp_path):
    cache = str(tmp_path)
    assert model_identity("some/model", None, hub_cache=cache) == {
        "model": "some/model",
        "revision": None,
        "commit": None,
    }
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("abc123\n")
    (refs / "v2").write_text("def456")
    assert model_identity("some/model", None, hub_cache=cache)["commit"] == "abc123"
    assert model_identity("some/model", "v2", hub_cache=cache)["commit"] == "def456"
    assert model_identity("some/model", "v3", hub_cache=cache)["commit"] is None


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_download_cache_is_where_the_environment_says(tmp_path, monkeypatch, variable):
    for name in ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    monkeypatch.setenv(variable, str(tmp_path))
    refs = tmp_path / below / "models--m" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("abc")
    assert model_identity("m", None)["commit"] == "abc"
