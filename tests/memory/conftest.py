import pytest

from fshard.memory.disk import _filesystem


@pytest.fixture
def disk_folder(tmp_path, tmp_path_factory, monkeypatch, request):
    """A folder on a disk, as FSHARD_DISK."""
    folder = tmp_path
    if _filesystem(tmp_path.stat().st_dev) in (
        "tmpfs",
        "ramfs",
    ):  # /tmp is memory: the checkout is not
        folder = request.config.rootpath / "build" / "disk"
        folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("FSHARD_DISK", str(folder))
    return folder
