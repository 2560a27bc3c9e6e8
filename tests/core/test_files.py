"""A file is replaced as a whole, or not at all."""

import errno
import os
import stat

import pytest

from slipstream.core.files import write_atomically


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "new" / "file"
    for content in (b"first", b"second"):
        write_atomically(path, lambda file, content=content: file.write(content))
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_write_that_fails_in_the_middle_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half of")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, write)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
