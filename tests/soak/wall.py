"""The wall clock of the server's processes, which the soak sets forward and back while they run."""

from __future__ import annotations

import random
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("wall.c")
SHIFTS = (0, 3600, -3600, 86400, -86400, 86400 * 400)  # seconds


class WallClock:
    """shift: seconds by which the processes started with `environment` are off. Needs a C compiler."""

    def __init__(self, folder: Path):
        self._library, self._file = folder / "wall.so", folder / "shift"
        self._file.write_bytes(struct.pack("q", 0))
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", self._library, SOURCE, "-ldl"], check=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_SHIFT": str(self._file)}

    @property
    def shift(self) -> int:
        return struct.unpack("q", self._file.read_bytes())[0]

    def jump(self, rng: random.Random) -> int:
        """To another shift; which."""
        shift = rng.choice([s for s in SHIFTS if s != self.shift])
        with open(self._file, "r+b") as file:  # in place: it is mapped
            file.write(struct.pack("q", shift))
        return shift

    def seen_by(self, pid: int) -> bool:
        """Whether the process is one whose clock we set."""
        return str(self._library) in Path(f"/proc/{pid}/maps").read_text()
