"""Compares the loaders with SPDL, DALI, FFCV and the stock DataLoader, over the same JPEG files.

    python extras/benchmarks/bench_peers.py --setup ffcv  # installs a peer (spdl, dali, ffcv) into its own environment
    python extras/benchmarks/bench_peers.py # over made-up photographs, or --data-root DIR

Each row delivers shuffled uint8 batches of 64: random crops, resized to 224x224, half of them mirrored, with as many
workers or threads as the others. FFCV reads its own file, which holds the same JPEGs, unchanged. The rows take turns
in five rounds, each time in a new process. It first reads all images once: the mean of each color must be that of the
first row (Pillow), within 2 levels. A row that fails is left out. Writes docs/peers.md and docs/peers.png.
On Debian, FFCV needs libopencv-dev, libturbojpeg0-dev, pkg-config and g++, and SPDL needs ffmpeg.
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import time
from itertools import islice
from pathlib import Path
from subprocess import run
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.image_folder import ImageFolder
from extras.benchmarks import photographs
from extras.benchmarks.bench_images import make_pack
from extras.benchmarks.peer_loaders import BATCH, PEERS, SIZE, batches
from extras.benchmarks.picture import draw_bars
from scripts.bench_harness import Columns, Row, in_turns, parser, report
from scripts.bench_loaders import count
from training.script import run_script

ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "bench_peers")
PACKS = {"pack of files": ["jpeg"], "pack, short side 256": ["jpeg", "--short-side", "256"], "pack of pixels": ["raw"]}
NAMES = {"torch": "DataLoader, Pillow", "torch-tv": "DataLoader, torchvision's decoder", "workers": "WorkerLoader"}
NAMES |= {peer: package.split()[-1] for peer, (package, _) in PEERS.items()}
FILES = [(loader, "files") for loader in ("torch", "torch-tv", *PEERS, "workers")]
PACK_ROWS = [("ffcv", "pack, short side 256"), *(("workers", pack) for pack in PACKS)]
ROWS = {f"{loader}, {reads}": (loader, reads) for loader, reads in [*FILES, *PACK_ROWS]}
NOTES = "space: of the files; ±: half of the rounds' range; ratio: to the first row. FFCV reads its own file format."
ROUNDS = 5
COLORS = ("red", "green", "blue")
COLUMNS: Columns = (
    ("name", "loader", "{}"),
    ("reads", "reads", "{}"),
    ("space", "space", "{:.2f}"),
    ("images_per_second", "images/s", "{:,.0f}"),
    ("spread", "±", "{:.0%}"),
    ("ratio", "ratio", "{:.2f}"),
    ("ours", "WorkerLoader to this", "{:.2f}"),
)


def turn(loader: str, reads: str, root: Path, workers: int, seconds: float) -> dict[str, float]:
    """Runs in a new process: the mean of each color over all images, then the speed."""
    torch.set_num_threads(1)  # loaders fork
    images = batches(loader, reads, root, workers)
    epoch = islice(images, len(ImageFolder(True, root)) // BATCH)
    means = [batch.float().mean((0, 1, 2) if batch.shape[3] == 3 else (0, 2, 3)) for batch in epoch]
    began = time.perf_counter()
    speed = count(images, seconds) / (time.perf_counter() - began)
    colors = torch.stack(means).mean(0).tolist()
    return {"images_per_second": speed, **dict(zip(COLORS, colors, strict=True))}


def measure(row: str, arguments: Any, root: Path, folder: Path, left: dict[str, str]) -> dict[str, float]:
    """Runs a turn in the peer's environment. If it fails, `left` gets the last line of its output."""
    peer = ROWS[row][0]
    python = ENVIRONMENTS / peer / "bin/python" if peer in PEERS else Path(sys.executable)
    if python.exists():
        settings = (f"--workers={arguments.workers}", f"--seconds={arguments.seconds}", f"--data-root={root}")
        command = [str(python), __file__, f"--turn={row}", *settings]
        done = run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        left[row] = (done.stderr.splitlines() or ["its process died"])[-1]
    else:
        left[row] = f"run `python extras/benchmarks/bench_peers.py --setup {peer}` first"
    return dict.fromkeys(("images_per_second", *COLORS), float("nan"))


def setup(peer: str) -> None:
    """Installs a peer into an environment that has the packages of this one, too."""
    run([sys.executable, "-m", "venv", "--clear", ENVIRONMENTS / peer], check=True)
    (packages,) = Path(ENVIRONMENTS, peer).glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    pip = [str(ENVIRONMENTS / peer / "bin/python"), "-m", "pip", "install", *PEERS[peer][0].split()]
    sys.exit(run(pip).returncode)


def compare(arguments: Any, root: Path, folder: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows of the table, and for each row that is left out the reason."""
    left = dict[str, str]()
    space = {"files": sum(path.stat().st_size for path in root.glob("train/*/*"))}
    for pack, options in PACKS.items():
        make_pack(root, folder / pack, "--format", *options)
        space[pack] = sum(path.stat().st_size for path in Path(folder, pack).glob("train-*"))
    first, *others = rows = in_turns(ROWS, lambda row: measure(row, arguments, root, folder, left), ROUNDS)
    for row in others:
        off = max(abs(row[color] - first[color]) for color in COLORS)
        if off > 2:
            left[row["loader"]] = f"the mean of a color is {off:.1f} levels from Pillow's"
    speeds = {row["loader"]: row["images_per_second"] for row in rows}
    for row in rows:
        loader, reads = ROWS[row["loader"]]
        speed = row["images_per_second"]
        row |= {"name": NAMES[loader], "reads": reads, "space": space[reads] / space["files"]}
        row |= {"ratio": speed / first["images_per_second"], "ours": speeds[f"workers, {reads}"] / speed}
    return [row for row in rows if row["loader"] not in left], left


def main(typed: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--setup", choices=PEERS, help="install a peer")
    options.add_argument("--data-root", type=Path, help="a folder of JPEGs (photographs that it makes)")
    options.add_argument("--workers", type=int, default=2, help="processes or threads of each loader (2)")
    options.add_argument("--seconds", type=float, default=4, help="of measuring in each turn (4)")
    options.add_argument("--out", type=Path, default="docs", help="folder of peers.md and peers.png (docs)")
    options.add_argument("--turn", help=argparse.SUPPRESS)
    arguments = options.parse_args(typed)
    if arguments.setup:
        return setup(arguments.setup)
    if arguments.turn:
        return print(
            json.dumps(turn(*ROWS[arguments.turn], arguments.data_root, arguments.workers, arguments.seconds))
        )
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.data_root or Path(folder, "images")
        if arguments.data_root is None:
            photographs.make(root)
        rows, left = compare(arguments, root.resolve(), Path(folder))
    title = f"JPEG to {SIZE}x{SIZE}: {arguments.workers} workers, {os.cpu_count()} cores, torch {torch.__version__}"
    reasons = "".join(f"\nLeft out: {row}: {reason}\n" for row, reason in left.items())
    text = report(title, COLUMNS, {"rows": rows, "left": left}, arguments.json, f"{NOTES}\n{reasons}".rstrip())
    (arguments.out / "peers.md").write_text(text)
    drawn = {f"{row['name']}: {row['reads']}": row for row in rows if row["reads"] != "pack of pixels"}  # not decoded
    (arguments.out / "peers.png").write_bytes(draw_bars(title, drawn, NAMES["workers"]))


if __name__ == "__main__":
    run_script(main)
