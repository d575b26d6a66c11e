"""Write the names of this code's images into the manifests: python3 images/manifests.py.

`make manifests` runs this. The registry is SIDGRAFT_REGISTRY. It needs Python 3.11 and nothing else. Prints the names,
one a line.
"""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "shared")]

from components.images import IMAGES, REGISTRY, RegistryError, built, registry  # noqa: E402

FILE = CHECKOUT / "manifests" / "components" / "images" / "kustomization.yaml"


def main() -> int:
    """Write kustomize's block `images`, the last of the file, anew; returns the exit status."""
    try:
        place = registry()
    except RegistryError as error:
        print(f"images/manifests.py: {error}", file=sys.stderr)
        return 2
    if not place:
        print(
            f"{REGISTRY} is not set: images have no registry, so the nodes must hold them already: one that does not"
            " asks Docker Hub, where their name is free for anyone to take.",
            file=sys.stderr,
        )
    lines = [FILE.read_text(encoding="utf-8").partition("images:\n")[0] + "images:"]
    for name in sorted(set(IMAGES.values())):
        reference = built(name, place)
        new, _, tag = reference.rpartition(":")
        lines += [f"  - name: {name}", f"    newName: {new}", f"    newTag: {tag}"]
        print(reference)
    FILE.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
