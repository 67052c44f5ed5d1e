"""The files and folders that docs/architecture.svg names exist."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.core_size import ROOT

PICTURE = ROOT / "docs" / "architecture.svg"


def named_paths() -> list[str]:
    """The paths in the picture. A name without a folder follows a path, and is beside it: `vlora/server/rpyc, http`."""
    paths: list[str] = []
    for text in ElementTree.parse(PICTURE).iter("{http://www.w3.org/2000/svg}text"):
        if text.get("class") != "file":
            continue
        for name in re.findall(r"[\w/.]+", (text.text or "").rpartition(": ")[2]):
            folder = "" if "/" in name else paths[-1].rpartition("/")[0] + "/"
            paths.append(folder + name)
    return paths


def test_the_files_of_the_picture_exist() -> None:
    paths = named_paths()
    assert len(paths) >= 10 and "vlora/server/http" in paths
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing
