import gzip
import lzma

import numpy as np
import pytest

from data import fashion
from data.errors import DataError
from data.fashion import FashionMini, read_idx
from tests.data.fakes import idx


def test_the_embedded_images_are_balanced_and_small_and_mean_and_std_are_theirs():
    for train, per_class in ((True, 1000), (False, 200)):
        dataset = FashionMini(train=train, pad=0)
        assert np.bincount(dataset.labels).tolist() == [per_class] * 10
        assert dataset.images.mean() / 255 == pytest.approx(dataset.mean[0], abs=0.005)
        assert dataset.images.std() / 255 == pytest.approx(dataset.std[0], abs=0.005)
    assert sum(path.stat().st_size for path in fashion.EMBEDDED.iterdir()) <= 5_000_000


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_an_idx_file_is_read_and_one_that_is_truncated_or_of_another_format_refused(tmp_path, suffix, pack):
    array, path = np.random.default_rng(0).integers(256, size=(3, 4, 5), dtype=np.uint8), tmp_path / f"a{suffix}"
    content = pack(idx(array))
    path.write_bytes(content)
    assert np.array_equal(read_idx(path), array)
    other = b"<html>not found</html>", b"\0\0\x0d\x01\0\0\0\x01a", b"\0\0\x08\x01\0\0\0\x01ab"
    for spoiled in (*(content[:length] for length in range(len(content))), *map(pack, other)):
        path.write_bytes(spoiled)
        with pytest.raises(DataError, match=f"{path.name} .*good copy"):
            read_idx(path)
