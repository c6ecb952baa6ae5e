"""Type check: ``python .ci/types.py``. Strict rooms have no error; the others never have more than the ratchet says.

``--update`` writes the ratchet after errors went away; ``--list ROOM`` shows what is left in a room.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rewrite", "kernels", "passes", "export", "cli")
STRICT = ("rewrite/ir", "rewrite/edit", "rewrite/sites", "rewrite/pipeline", "rewrite/driver.py", "rewrite/api.py")
RATCHET = ROOT / ".ci" / "types.txt"


def room(file: str) -> str:
    """The folder below the package that a file lies in, or the file itself where it lies in the package."""
    return "/".join(Path(file).parts[:2])


def errors() -> list[tuple[str, str]]:
    """(file, message) of every error under ``--strict``. The packages are seen as ``hcx.NAME`` through links."""
    view = ROOT / ".types" / "hcx"
    view.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = view / folder
        if not link.is_symlink():
            link.symlink_to(Path("..") / ".." / folder)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-error-codes", "--cache-dir",
               str(ROOT / ".types" / "cache"), "-p", "hcx"]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"MYPYPATH": str(ROOT / ".types")}
    )
    if done.returncode > 1:
        sys.exit(done.stdout + done.stderr)
    lines = (re.match(r"(?:.*?hcx/|)(\S+?\.py):(\d+): error: (.*)", line) for line in done.stdout.splitlines())
    return [(m[1], f"{m[1]}:{m[2]}: {m[3]}") for m in lines if m]


def main(arguments: list[str]) -> int:
    found = errors()
    if arguments[:1] == ["--list"]:
        print("\n".join(text for file, text in found if file.startswith(tuple(arguments[1:]))))
        return 0
    counts = Counter(room(file) for file, _ in found)
    strict = [text for file, text in found if file.startswith(STRICT)]
    if arguments == ["--update"]:
        RATCHET.write_text("".join(f"{n:4d} {name}\n" for name, n in sorted(counts.items())))
    allowed = {name: int(n) for n, name in (line.split() for line in RATCHET.read_text().splitlines())}
    grown = [
        f"{name}: {n} errors, {allowed.get(name, 0)} allowed" for name, n in counts.items() if n > allowed.get(name, 0)
    ]
    print("\n".join([*strict, *grown, f"{len(found)} errors under --strict, {len(strict)} in strict rooms"]))
    return 1 if strict or grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
