"""Runs `gpu-session` from a plain copy of the tree, with nothing installed but PyTorch, Triton, NumPy and tqdm:

    python benchmarks/gpu_session/plain.py --wheels wheels --part correctness

The tree is imported as `matmix` by a link in a temporary folder, which goes to PYTHONPATH; wheels of other packages in
the folder after --wheels, such as the peers', are unpacked beside it. All other arguments are those of `gpu-session`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def unpack(wheel: Path, folder: Path) -> None:
    """What pip would put on the path, without scripts."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            words = name.split("/")
            if words[0].endswith(".data"):
                if len(words) < 3 or words[1] not in ("purelib", "platlib"):
                    continue
                words = words[2:]
            target = folder.joinpath(*words).resolve()
            if not name.endswith("/") and target.is_relative_to(folder.resolve()):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def main(arguments: list[str]) -> int:
    """The command."""
    wheels: list[Path] = []
    if "--wheels" in arguments:
        place = arguments.index("--wheels")
        given = Path(arguments[place + 1]) if place + 1 < len(arguments) else Path()
        wheels = sorted(given.glob("*.whl"))
        if not wheels:
            print(f"there are no wheels in {given}", file=sys.stderr)
            return 2
        arguments = arguments[:place] + arguments[place + 2 :]
    # Python has put this file's folder on the path; other packages would find our modules there.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (HERE, ROOT)]
    with tempfile.TemporaryDirectory(prefix="matmix-") as folder:
        path = [Path(folder, "tree"), Path(folder, "wheels")]
        path[0].mkdir()
        path[0].joinpath("matmix").symlink_to(ROOT, target_is_directory=True)
        for wheel in wheels:
            unpack(wheel, path[1])
        words = [str(x) for x in path]
        os.environ["PYTHONPATH"] = os.pathsep.join([*words, *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.path[:0] = words
        from matmix.benchmarks.__main__ import main as benchmarks

        return benchmarks(["gpu-session", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
