"""Bring a model into the object store, once, under a name that says which.

    python -m sidgraft.fetch MODEL s3://BUCKET/FOLDER

MODEL is a hub's name (downloaded here) or a directory. It lands in FOLDER/<name>-<digest>, where the digest is the
hub's commit or that of the directory's files, so that the address never stands for other weights; pods then load it
from there (`expand_base_model`, `embed_encoder`) and none needs a way to the hub. Weights come as safetensors alone.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from sidgraft import storage

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def main(argv: list[str] | None = None) -> int:
    """Run the command; prints the address. Returns the exit status: 1 where the hub or the store says no."""
    parser = argparse.ArgumentParser(prog="python -m sidgraft.fetch", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a hub's name, or a directory")
    parser.add_argument("place", metavar="s3://BUCKET/FOLDER", help="where models lie")
    parser.add_argument("--revision", default="", metavar="TEXT", help="commit, tag or branch of the hub; the newest")
    given = parser.parse_args(argv)
    try:
        print(fetch(given.model, given.place, revision=given.revision))
    except (OSError, ValueError) as error:
        print(f"python -m sidgraft.fetch: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(model: str, place: str, *, revision: str = "") -> str:
    """Upload a model to ``place``/<name>-<digest> unless it is there, and return that address.

    Raises ValueError where there is no such model, or it holds no safetensors.
    """
    folder = Path(model)
    if folder.is_dir():
        digest = hashlib.sha256("\n".join(map(_line, _files(folder))).encode()).hexdigest()
    else:
        folder = _downloaded(model, revision)
        digest = folder.name  # the commit
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{model} holds no *.safetensors file, and other weights are not loaded here.")
    address = f"{place.rstrip('/')}/{Path(model).name}-{digest[:12]}"
    if not storage.exists(address):
        storage.upload(folder, address)
    return address


def _downloaded(model: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model!r} is no directory here, and the hub does not give it: {str(error).splitlines()[0]} Check the"
            " name, the network, and HF_TOKEN where the model asks for consent."
        ) from error


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def _line(file: Path) -> str:
    with file.open("rb") as stream:
        return f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}"


if __name__ == "__main__":
    sys.exit(main())
