"""The image of deploy/Dockerfile, built by podman on a base that mmdebstrap makes, where both are installed.

It takes about ten minutes, most of it torch. The image's programs are run; no GPU and no cluster is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE, IMAGE = "localhost/tandem-test-base:1", "localhost/tandem-test:cpu"
TOOLS = ("podman", "mmdebstrap", "crun")
PACKAGES = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
#: Settings of pip that a build needs where packages come from a mirror.
PIP_FILES = (Path("/etc/pip.conf"), Path.home() / ".config/pip", Path("/etc/ssl/certs"))

pytestmark = [
    pytest.mark.wide,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)) or os.geteuid() != 0,
        reason=f"building the image takes root and Debian's packages {', '.join(TOOLS)}",
    ),
]


def podman(*arguments: str) -> str:
    ended = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    archive = tmp_path_factory.mktemp("base") / "base.tar"
    subprocess.run(
        ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(archive)],
        check=True,
        capture_output=True,
    )
    podman("import", str(archive), BASE)
    mounts = [f"--volume={path}:{path}:ro" for path in PIP_FILES if path.exists()]
    if wheels := os.environ.get("PIP_FIND_LINKS"):
        mounts += [f"--volume={wheels}:{wheels}:ro", f"--env=PIP_FIND_LINKS={wheels}"]
    podman(
        *("build", "--isolation", "chroot", "--network", "host", "--target", "cpu"),
        *("--build-arg", f"BASE={BASE}", *mounts, "--tag", IMAGE),
        *("--file", str(ROOT / "deploy/Dockerfile")),
        *("--ignorefile", str(ROOT / "deploy/Dockerfile.dockerignore"), str(ROOT)),
    )
    yield IMAGE
    podman("rmi", "--force", IMAGE, BASE)


def test_the_image_is_not_root_and_holds_no_compiler(image: str) -> None:
    (found,) = json.loads(podman("image", "inspect", image))
    assert found["Config"]["User"] == "10001:10001"
    print(f"{found['Size'] / 1e9:.2f} GB")
    with_root = Path(podman("image", "mount", image).strip())
    try:
        assert not (with_root / "usr/bin/g++").exists()
        assert not (with_root / "src").exists()
        programs = {path.name for path in (with_root / "opt/tandem/bin").glob("tandem*")}
        assert {"tandem", "tandem-gateway", "tandem-decode", "tandem-prefill", "tandem-lookahead"} <= programs
        # In a chroot, since a container needs rights that this machine may not give.
        for program in ("tandem", "tandem-gateway", "tandem-decode"):
            command = [
                "chroot",
                "--userspec=10001:10001",
                str(with_root),
                f"/opt/tandem/bin/{program}",
                "--help",
            ]
            ended = subprocess.run(command, capture_output=True, text=True, env={"HOME": "/tmp"}, check=False)
            assert ended.returncode == 0, ended.stderr
    finally:
        podman("image", "unmount", image)
