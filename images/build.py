"""Build the container images, and push them: python3 images/build.py [data] [cpu] [gpu] [-- ARGUMENTS OF docker build].

`make images` runs this. It needs Python 3.11 and Docker, nothing else. PIP_INDEX_URL, PIP_NO_INDEX and TORCH_INDEX are
handed to the builds where they are set. Prints the names of what it built, one a line.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ABSENT = re.compile(r"no such (image|manifest|object)|manifest unknown|: not found$", re.IGNORECASE | re.MULTILINE)
CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "shared")]

from components.images import IMAGES, TAG, RegistryError, built, code_tag, registry  # noqa: E402

NAMES = sorted({name.removeprefix("sidgraft/") for name in IMAGES.values()})
FROM_ENVIRONMENT = ("PIP_INDEX_URL", "PIP_NO_INDEX", "TORCH_INDEX")


class ReleaseError(RuntimeError):
    """The release is out already, with another image; the message says where."""


def main(arguments: list[str]) -> int:
    """Build each image that is named; returns the exit status of the first Docker command that fails."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        parser = _parser()
    except RegistryError as error:
        print(f"images/build.py: {error}", file=sys.stderr)
        return 2
    given = parser.parse_args(arguments[:cut])
    unknown = set(given.names) - set(NAMES)
    if unknown:
        parser.error(f"there is no image {', '.join(sorted(unknown))}; the images are {', '.join(NAMES)}.")
    if given.push and not given.registry:
        parser.error("--push needs a registry: give --registry HOST/PATH, or set SIDGRAFT_REGISTRY.")
    refused = False
    for name in given.names or NAMES:
        try:
            build(name, given, arguments[cut + 1 :])
        except FileNotFoundError:
            print("images/build.py: there is no command docker; install Docker.", file=sys.stderr)
            return 1
        except ReleaseError as error:  # the other images may still be released
            print(f"images/build.py: {error}", file=sys.stderr)
            refused = True
        except subprocess.CalledProcessError as error:
            print(f"images/build.py: {' '.join(error.cmd[:2])} failed for the image {name}.", file=sys.stderr)
            return 1
    return int(refused)


def build(name: str, given: argparse.Namespace, docker_arguments: list[str]) -> None:
    """Build one image under the tag of this code, and push it where that is asked."""
    image = f"sidgraft/{name}"
    reference = built(image, given.registry)
    settings = {"VERSION": code_tag(image)} | {key: os.environ[key] for key in FROM_ENVIRONMENT if os.environ.get(key)}
    if given.base_image:
        settings["BASE_IMAGE"] = given.base_image
    if name != "cpu":
        settings.pop("TORCH_INDEX", None)  # a build argument that a Dockerfile does not know is a warning or an error
    command = ["docker", "build", "--file", f"images/{name}/Dockerfile", "--tag", reference]
    for key, value in settings.items():
        command += ["--build-arg", f"{key}={value}"]
    _run([*command, *docker_arguments, "."])
    if given.push:
        _run(["docker", "push", reference])
    print(reference, flush=True)
    if given.release:
        release(reference, given.push)


def release(reference: str, push: bool) -> None:
    """Give an image of this code the tag of the version, too, which never moves: refuse where another image has it.

    KFP's cache knows code by the tag. A registry is asked for what both tags stand for there, so the image was pushed.
    """
    tag = f"{reference.rpartition(':')[0]}:{TAG}"
    taken = _answer("docker", "image", "inspect", "--format", "{{.Id}}", tag)
    if taken and taken != _answer("docker", "image", "inspect", "--format", "{{.Id}}", reference):
        raise ReleaseError(
            f"{tag} is another image on this machine already, and a release tag never moves: raise the version. Where"
            f" nothing has run with it and it is nowhere else, take it away: docker rmi {tag}."
        )
    if push:
        pushed, taken = (_answer("docker", "manifest", "inspect", name) for name in (reference, tag))
        if not pushed or taken is None:
            raise ReleaseError(
                f"docker manifest inspect does not show what {reference} and {tag} are, so whether the latter is out"
                " already is not known. Have it work (rights to read, a registry with TLS), or look there, then"
                f" docker tag {reference} {tag} and docker push {tag}."
            )
        if taken and taken != pushed:
            raise ReleaseError(
                f"{tag} is another image at the registry already, and a release tag never moves: raise the version."
                " Where it was made of this very code it is out, and nothing is to be done."
            )
    _run(["docker", "tag", reference, tag])
    if push:
        _run(["docker", "push", tag])
    print(tag, flush=True)


def _answer(*command: str) -> str | None:
    """Return what Docker says; an empty text where there is no such image, None where it cannot tell."""
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    return "" if ABSENT.search(done.stderr) else None


def _run(command: list[str]) -> None:
    subprocess.run(command, cwd=CHECKOUT, stdout=sys.stderr, check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="images/build.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--registry", default=registry(), metavar="HOST/PATH", help="default: SIDGRAFT_REGISTRY")
    parser.add_argument("--base-image", metavar="IMAGE", help="another base: Python 3.11 with pip")
    parser.add_argument("--release", action="store_true", help=f"tag them {TAG} too, as the committed YAML does, once")
    parser.add_argument("--push", action="store_true", help="push them to the registry")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
