"""A record in a file keeps the first text; the oracle is the file's content."""

from fshard.mesh.record import FileRecord


def test_file_keeps_its_first_text(tmp_path):
    first = FileRecord(tmp_path / "decision")
    second = FileRecord(tmp_path / "decision")
    assert second.current() == ""
    assert first.decide("take") == "take"
    assert second.decide("left") == "take"
    assert [path.name for path in tmp_path.iterdir()] == ["decision"]
    second.remove()
    assert first.current() == ""
