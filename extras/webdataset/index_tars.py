"""Writes an index beside each tar shard, so that data=webdataset starts at once: it need not read all shards first.

    python extras/webdataset/index_tars.py 's3://bucket/train-{0000..1281}.tar' 's3://bucket/test-{00..49}.tar'

In a bucket the index is URL.index.npz, beside a local shard a hidden file. Run this again after a shard has changed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from extras.webdataset.tar_index import each_shard, put_index
from extras.webdataset.webdataset import find_shards
from training.script import parser, run_script


def main(typed: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("urls", nargs="+", help="shards, as data.urls names them")
    shards = find_shards("URLS", options.parse_args(typed).urls)
    counts = each_shard(put_index, shards, "indexing")
    print(f"{len(shards):,} shards with {sum(counts):,} images have an index now")


if __name__ == "__main__":
    run_script(main)
