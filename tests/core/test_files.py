"""A file is replaced as a whole, or not at all."""

import errno
import os
import stat

import pytest

from slipstream.core.files import (
    appended,
    replaced_folder,
    write_atomically,
    write_json,
    write_text,
)


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


def test_texts_and_json_end_as_they_should(tmp_path):
    write_text(tmp_path / "text", "é")
    write_json(tmp_path / "json", {"a": [1]})
    assert (tmp_path / "text").read_bytes() == "é".encode()
    assert (tmp_path / "json").read_text() == '{\n  "a": [\n    1\n  ]\n}\n'


def test_a_folder_is_replaced_when_the_new_one_is_complete(tmp_path):
    path = tmp_path / "new" / "folder"
    for content in ("first", "second"):
        with replaced_folder(path) as made:
            (made / content).write_text(content)
            assert not (path / content).exists()
        assert os.listdir(path) == [content]
    assert os.listdir(path.parent) == ["folder"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_folder_that_is_not_finished_leaves_the_old_one(tmp_path, error):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(type(error)), replaced_folder(path) as made:
        (made / "half").touch()
        raise error
    assert os.listdir(path) == ["old"] and os.listdir(tmp_path) == ["folder"]


def test_lines_are_added_and_a_torn_tail_is_cut_off_with_a_sentence(tmp_path, capsys):
    path = tmp_path / "new" / "lines"
    with appended(path) as add:
        add("one")
    assert capsys.readouterr().out == ""
    path.write_bytes(path.read_bytes() + b"tw")
    with appended(path) as add:
        add("two")
    assert path.read_text() == "one\ntwo\n"
    assert "its last 2 bytes were cut off" in capsys.readouterr().out
