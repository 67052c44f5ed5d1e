"""docs/reference is what docs/make_reference.py writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.test_api_guide import ROOT


def test_the_reference_is_current(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; import make_reference\n"
    script += "for file, text in make_reference.pages().items(): (Path(sys.argv[1]) / file.name).write_text(text)\n"
    script += "assert not {'vlora', 'atmm', 'heads', 'fusion', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT / "docs", check=True)
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    committed = {file.name: file.read_text() for file in (ROOT / "docs" / "reference").iterdir()}
    assert written.keys() == committed.keys()
    old = [name for name, text in written.items() if committed[name] != text]
    assert not old, f"run `python docs/make_reference.py`: {old} are out of date"
