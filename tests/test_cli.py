"""The command line: what it prints where, exit codes, pipes, Ctrl-C, and that help is quick."""

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest

from kvferry import __version__, cli
from kvferry.kvops.config import Config, markdown_table
from kvferry.kvops.errors import ArenaBusyError, ConfigError


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def doctor(monkeypatch):
    """Return a setter of what the doctor command does."""
    module = importlib.import_module("kvferry.doctor.command")
    return lambda run: monkeypatch.setattr(module, "run", run)


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvferry {__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    for command in ["doctor", "config", "demo", "disk"]:
        assert command in text


@pytest.mark.parametrize("command", ["doctor", "config", "disk"])
def test_every_command_has_examples_and_json(capsys, command):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "--json" in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["config", "--dance"],
        ["config", "--json", "--explain"],
        ["config", "--extra-config", "{"],
        ["config", "--extra-config", "[1]"],
    ],
)
def test_usage_errors_are_two_and_on_stderr(capsys, argv):
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: kvferry" in captured.err
    assert "Traceback" not in captured.err


def test_config_explain(capsys, monkeypatch):
    monkeypatch.setenv("KVFERRY_VERIFY", "off")
    assert cli.main(["config", "--explain", "--extra-config", '{"arena_bytes": "8GiB"}']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["arena_bytes", "8", "GiB", "extra", "config"]
    assert ["verify", "off", "KVFERRY_VERIFY"] in [line.split() for line in lines]
    for row in Config().explain():
        assert f"    {row.help}" in lines
    assert "KVFERRY_TRACE  unset  environment only" in lines


def test_config_takes_the_whole_connector_config_too(capsys):
    whole = {"kv_connector": "X", "kv_connector_extra_config": {"transfer_threads": 3}}
    assert cli.main(["config", "--json", "--extra-config", json.dumps(whole)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["transfer_threads"]["value"] == 3
    assert rows["transfer_threads"]["source"] == "extra config"
    assert rows["arena_path"]["value"] is None


def test_config_markdown_and_plain(capsys):
    assert cli.main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown_table()
    assert cli.main(["config"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(Config().explain())


def test_a_wrong_setting_is_one_line_and_two(capsys):
    assert cli.main(["config", "--extra-config", '{"arena_byte": 1}']) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "kvferry: unknown key 'arena_byte' in kv_connector_extra_config; "
        "did you mean 'arena_bytes'?\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("x must be y"), 2, "kvferry: x must be y\n"),
        (ArenaBusyError("process 7 owns it"), 1, "kvferry: process 7 owns it\n"),
        (KeyboardInterrupt(), 130, "kvferry: interrupted\n"),
    ],
)
def test_our_errors_are_one_line(capsys, doctor, error, code, line):
    def run(args):
        raise error

    doctor(run)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_commands(doctor, code):
    doctor(lambda args: code)
    assert cli.main(["doctor"]) == code


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom kvferry import cli\ncli.main(['--help'])\ncli.main(['config'])\n"
        "print(sorted({'torch', 'numpy', 'vllm', 'triton', 'xxhash'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("argv", [["--help"], ["config", "--explain"], ["config", "--markdown"]])
def test_a_closed_pipe_is_quiet(argv):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *argv],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    # argparse itself drops help that nobody reads, and then all is well
    assert done.returncode in ((0, 141) if argv == ["--help"] else (141,))
    assert done.stderr == ""


def test_ctrl_c_is_130_and_one_line():
    # a shell's background job is born with SIGINT ignored, and hands that on
    code = (
        "import signal, sys, time\nfrom kvferry import cli\nfrom kvferry.doctor import command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def run(args):\n"
        "    print('started', flush=True)\n"
        "    time.sleep(60)\n"
        "command.run = run\nsys.exit(cli.main(['doctor']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "kvferry: interrupted\n")


def test_doctor_for_real(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kvferry"] == __version__
    names = {finding["name"] for finding in answer["findings"]}
    assert {"python", "torch", "vllm", "cpu", "memlock", "/dev/shm", "cgroup", "numa"} <= names
    assert not [f for f in answer["findings"] if "could not be found out" in f["value"]]


def test_sigterm_ends_it_like_ctrl_c_so_that_everything_is_cleaned_up(tmp_path):
    witness = tmp_path / "cleaned"
    program = f"""
import pathlib, signal, sys
from kvferry import cli

def command(argv):
    try:
        print("ready", flush=True)
        signal.pause()
    finally:
        pathlib.Path({str(witness)!r}).touch()

cli._run = command
sys.exit(cli.main([]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == cli.EXIT_TERMINATED
    assert errors == "kvferry: terminated\n"
    assert witness.exists()
