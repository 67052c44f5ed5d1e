"""An interrupted bench resumes, but never with the values of another run."""

from __future__ import annotations

from pathlib import Path

from vlora.bench.journal import Journal

OF = {"commit": "abc", "quick": False}


def never() -> object:
    raise AssertionError("made twice")


def test_known_values_are_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "policy.partial"
    first = Journal(path, OF)
    assert first.once("cell 1", lambda: {"ms": (1.5, 2)}) == {"ms": [1.5, 2]}, "as a later run reads it"
    assert first.once("cell 1", never) == {"ms": [1.5, 2]}
    second = Journal(path, OF)
    assert second.once("cell 1", never) == {"ms": [1.5, 2]}
    assert second.once("cell 2", lambda: 3) == 3
    assert Journal(path, OF).once("cell 2", never) == 3


def test_only_a_truncated_line_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    journal = Journal(path, OF)
    journal.once("whole", lambda: 1)
    journal.once("cut", lambda: [1, 2, 3])
    path.write_text(path.read_text()[:-4])
    again = Journal(path, OF)
    assert again.once("whole", never) == 1
    assert again.once("cut", lambda: "new") == "new"
    last = Journal(path, OF)
    assert (last.once("whole", never), last.once("cut", never)) == (1, "new")


def test_values_of_another_commit_are_discarded(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    Journal(path, OF).once("cell", lambda: 1)
    other = Journal(path, {**OF, "commit": "def"})
    assert other.once("cell", lambda: 2) == 2
    assert Journal(path, OF).once("cell", lambda: 3) == 3, "and not the value before that"


def test_close_deletes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    journal = Journal(path, OF)
    journal.once("cell", lambda: 1)
    journal.close()
    assert not path.exists()


def test_without_a_file_values_are_kept_in_memory() -> None:
    journal = Journal(None, OF)
    assert journal.once("cell", lambda: 1) == journal.once("cell", never) == 1
    journal.close()
