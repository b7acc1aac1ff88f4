"""Build the wheel and the sdist of fshard in `dist/`, and check them in a bare environment.

    make dist

1. Build both by the backend of pyproject.toml.
2. Build a wheel from the sdist: it has the same files.
3. The wheel has each file of the package that git tracks, so no page or table of data is left out.
4. Its metadata are valid, as an index checks them.
5. In a new environment with the wheel and its dependencies alone: every module is imported, the
   doctor finds no fault, and the program of the README trains.
"""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# Third-party modules of extras: a module of fshard that needs one says so when it is imported.
OPTIONAL = {"anywidget", "hypothesis", "pytest", "tensorboard", "transformers"}

IMPORT_ALL = f"""
import importlib, pkgutil, fshard
count = 0
for module in pkgutil.walk_packages(fshard.__path__, "fshard."):
    if module.name == "fshard.__main__":
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in {OPTIONAL}:
            raise
print(count, "modules are imported")
"""


def main() -> None:
    """Build and check."""
    with TemporaryDirectory() as folder:
        python = new_environment(Path(folder) / "build", "hatchling")
        wheel, sdist = build(python)
        from_sdist = build_from(python, sdist, Path(folder) / "from_sdist")
        assert contents(from_sdist) == contents(wheel), "the sdist builds another wheel"
        check_files(wheel)
        check_metadata(wheel)
        check_in_use(new_environment(Path(folder) / "bare", str(wheel)), Path(folder))
    print(f"{wheel.relative_to(ROOT)} and {sdist.relative_to(ROOT)} are good")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command as a user of a new shell would, without this tree in the path of Python."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(word) for word in command], check=True, cwd=cwd, env=environment)


def new_environment(folder: Path, *packages: str) -> Path:
    """Return the interpreter of a new environment that has some packages."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    options = ["--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    run(python, "-m", "pip", "install", *options, *packages)
    return python


def build(python: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist in `dist/`; return both."""
    for old in DIST.glob("fshard-*"):
        old.unlink()
    run(python, "-m", "hatchling", "build", "--directory", DIST)
    (wheel,) = DIST.glob("fshard-*.whl")
    (sdist,) = DIST.glob("fshard-*.tar.gz")
    return wheel, sdist


def build_from(python: Path, sdist: Path, folder: Path) -> Path:
    """Return the wheel that a user builds from the sdist."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(python, "-m", "pip", "wheel", *options, sdist)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


def check_files(wheel: Path) -> None:
    """Check that the wheel has each file of the package that git tracks."""
    command = ["git", "ls-files", "fshard"]
    tracked = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    missing = {*tracked.stdout.split()} - contents(wheel).keys()
    assert not missing, f"the wheel lacks {sorted(missing)}"


def check_metadata(wheel: Path) -> None:
    """Check the metadata by their standard: names, versions, requirements, the licence."""
    (text,) = [data for name, data in contents(wheel).items() if name.endswith("/METADATA")]
    metadata = Metadata.from_email(text, validate=True)
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert str(metadata.version) == project["version"]
    assert metadata.description_content_type == "text/markdown"


def check_in_use(python: Path, folder: Path) -> None:
    """Check that what a user begins with works, outside of this tree."""
    run(python, "-c", IMPORT_ALL, cwd=folder)
    run(python.with_name("fshard"), "--version", cwd=folder)
    run(python.with_name("fshard"), "doctor", cwd=folder)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (folder / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    run(python, "readme.py", cwd=folder)


if __name__ == "__main__":
    main()
