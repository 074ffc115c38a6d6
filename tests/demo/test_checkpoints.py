import dataclasses
import hashlib
import threading

import pytest

pytest.importorskip("safetensors")

from safetensors import safe_open

from kvferry.demo import checkpoints
from kvferry.demo.checkpoints import CHECKPOINTS, cache_folder, ensure_checkpoint

TINY = ["llama", "mla", "hybrid"]


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("name", TINY)
def test_the_same_bytes_every_time(name, tmp_path):
    first = ensure_checkpoint(CHECKPOINTS[name], tmp_path / "a")
    second = ensure_checkpoint(CHECKPOINTS[name], tmp_path / "b")
    assert digest(first) == digest(second)
    assert set(digest(first)) == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("name", TINY)
def test_every_layer_has_its_weights(name, tmp_path):
    config = CHECKPOINTS[name].config
    folder = ensure_checkpoint(CHECKPOINTS[name], tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        embedding = file.get_slice("model.embed_tokens.weight").get_shape()
    assert embedding == [config["vocab_size"], config["hidden_size"]]
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    assert layers == set(range(config["num_hidden_layers"]))
    assert ("lm_head.weight" in names) is not config["tie_word_embeddings"]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    folder = ensure_checkpoint(CHECKPOINTS["llama"], tmp_path)
    (folder / "model.safetensors").write_bytes(b"touched")
    assert ensure_checkpoint(CHECKPOINTS["llama"], tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == b"touched"


def test_another_configuration_is_another_folder(tmp_path):
    original = CHECKPOINTS["llama"]
    other = dataclasses.replace(original, config={**original.config, "num_hidden_layers": 1})
    assert ensure_checkpoint(original, tmp_path) != ensure_checkpoint(other, tmp_path)


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(checkpoint, folder):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_checkpoint(CHECKPOINTS["llama"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_that_write_at_once_both_succeed(tmp_path, monkeypatch):
    both_write = threading.Barrier(2, timeout=60)
    write = checkpoints._write

    def write_together(checkpoint, folder):
        write(checkpoint, folder)
        both_write.wait()

    monkeypatch.setattr(checkpoints, "_write", write_together)
    folders = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(ensure_checkpoint(CHECKPOINTS["llama"], tmp_path))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert folders == [folders[0]] * 2
    assert list(tmp_path.iterdir()) == [folders[0]]


def test_unknown_model_type_is_refused():
    from kvferry.demo.weights import make_weights

    with pytest.raises(ValueError, match=r"model_type must be one of llama.*got gpt"):
        make_weights({"model_type": "gpt"})


def test_where_checkpoints_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("KVFERRY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "kvferry"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kvferry"
