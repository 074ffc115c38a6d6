"""Write connector/engine_signatures.json from unpacked vLLM packages, one for each minor version.

Run: ``python scripts/record_signatures.py 0.30=PATH 0.31=PATH 0.32=PATH 0.33=PATH`` where PATH is a folder that
holds ``v1/kv_offload/base.py`` (the ``vllm`` folder of an unpacked wheel or sdist; nothing is imported from it).
A version that is not named keeps what is recorded.
"""

import json
import sys
from pathlib import Path

from kvferry.connector import signatures

TARGET = Path(__file__).resolve().parents[1] / "connector" / "engine_signatures.json"


def main(arguments: list[str]) -> int:
    """Record the versions named on the command line; return the exit code."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    table = signatures.recorded() if TARGET.exists() else {}
    for argument in arguments:
        version, _, folder = argument.partition("=")
        found = signatures.read_signatures(Path(folder))
        if not found:
            print(f"no vLLM package in {folder!r}", file=sys.stderr)
            return 2
        table[version] = found
    ordered = dict(
        sorted(table.items(), key=lambda item: [int(part) for part in item[0].split(".")])
    )
    lines = []
    for version, found in ordered.items():
        rows = ",\n".join(
            f"  {json.dumps(label)}: {json.dumps(found[label])}" for label in sorted(found)
        )
        lines.append(f" {json.dumps(version)}: {{\n{rows}\n }}")
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(
        f"{TARGET}: {', '.join(f'{version} ({len(found)})' for version, found in ordered.items())}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
