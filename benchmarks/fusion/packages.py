"""Pictures and fonts of packages of Debian 12 and npm, fetched by `apt-get download` and `npm pack`.

`packages.sha256` pins each package's version and content; `sha256sum -c` checks a folder of them.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from urllib.parse import unquote

from vlora.errors import BadConfig
from vlora.run_folder import whole

_TABLE = Path(__file__).with_name("packages.sha256")
_KEPT = "/64/"  # of npm's emoji, the pictures of 64 pixels


def fetch(folder: Path, table: Path = _TABLE) -> Path:
    """Download the packages that are missing in `folder`, check and unpack them.

    Returns:
        A folder with a folder per package, by its name.

    Raises:
        BadConfig: A package cannot be downloaded, or has another content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for line in table.read_text().splitlines():
        wanted, file = line.split()
        path, unpacked = folder / file, folder / "unpacked" / name_of(file)
        if unpacked.is_dir():
            continue
        if not path.exists():
            _download(path)
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != wanted:
            raise BadConfig(f"{path} has the SHA-256 {found} instead of {wanted}; delete it and fetch it again")
        with whole(unpacked, durable=False) as made:
            made.mkdir(parents=True)
            _unpack(path, made)
    return folder / "unpacked"


def name_of(file: str) -> str:
    """Of a package, by the name of its file: NAME_VERSION_all.deb or NAME-VERSION.tgz."""
    return file.partition("_")[0] if file.endswith(".deb") else file.rpartition("-")[0]


def _download(path: Path) -> None:
    name = name_of(path.name)
    if path.suffix == ".deb":
        command = ["apt-get", "download", f"{name}={unquote(path.name.split('_')[1])}"]
    else:
        command = ["npm", "pack", "--silent", f"{name}@{path.name.removeprefix(f'{name}-').removesuffix('.tgz')}"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            said = ended.stderr.strip().splitlines()
        except OSError as error:
            said = [f"{command[0]}: {error.strerror}"]
        if (found := Path(folder) / path.name).exists():
            found.replace(path)
    if not path.exists():
        raise BadConfig(
            f"{path.name} cannot be fetched by '{' '.join(command)}' ({said[-1] if said else 'no message'}); run it on "
            f"a machine with a network (packages of Debian 12, npm), and copy the file into {path.parent}"
        )


def _unpack(path: Path, folder: Path) -> None:
    if path.suffix == ".deb":
        if shutil.which("dpkg-deb") is None:
            raise BadConfig(f"dpkg-deb, which unpacks {path.name}, is not installed; install the package dpkg")
        subprocess.run(["dpkg-deb", "-x", path, folder], check=True)
        return
    with tarfile.open(path) as archive:
        members = [each for each in archive if _KEPT in each.name or each.name == "package/emoji.json"]
        archive.extractall(folder, members, filter="data")
