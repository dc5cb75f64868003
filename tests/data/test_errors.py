import pytest

from data.errors import DataError, read_lines


def test_a_list_has_its_lines_without_empty_ones_and_a_byte_order_mark(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for content in (b"caf\xc3\xa9 x\nb", b"\xef\xbb\xbfcaf\xc3\xa9 x\r\nb\r\n\r\n", b"\ncaf\xc3\xa9 x\n \nb\n"):
        (tmp_path / "names.txt").write_bytes(content)
        assert read_lines("data.classes=", "~/names.txt") == ["caf\u00e9 x", "b"]
    for content in ("b\n".encode("utf-16"), None):
        (tmp_path / "names.txt").write_bytes(content) if content else (tmp_path / "names.txt").unlink()
        with pytest.raises(DataError, match=r"data.classes=~/names.txt cannot be read \(.+\); set it to a text file"):
            read_lines("data.classes=", "~/names.txt")
