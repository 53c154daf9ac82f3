"""The journal: cells come back, from a file, from another process, and after a write that was cut off."""

import json
import math

from opacus_expm.experiments.journal import Journal

CELL, OTHER = {"method": "expm", "seed": 1}, {"method": "expm", "seed": 2}


def test_a_cell_comes_back_under_its_configuration_alone(tmp_path):
    path = tmp_path / "new" / "cells.jsonl"
    journal = Journal(path, "this")
    assert journal.get(CELL) is None
    assert journal.put(CELL, {"value": 1.5}) == {"value": 1.5}
    assert Journal(path, "this").get({"seed": 1, "method": "expm"}) == {"value": 1.5}
    assert Journal(path, "this").get(OTHER) is None
    assert Journal(path, "other").entries() == []


def test_without_a_file_cells_are_kept_in_memory():
    journal = Journal(None, "this")
    journal.put(CELL, {"value": math.inf})
    assert journal.get(CELL) == {"value": math.inf}
    assert journal.entries() == [(CELL, {"value": math.inf})]


def test_what_another_process_finished_is_found(tmp_path):
    ours, theirs = (Journal(tmp_path / "cells.jsonl", "this") for _ in range(2))
    ours.put(CELL, {"value": 1.0})
    theirs.put(OTHER, {"value": 2.0})
    assert ours.get(OTHER) == {"value": 2.0}
    assert theirs.get(CELL) == {"value": 1.0}
    assert ours.entries() == [(CELL, {"value": 1.0}), (OTHER, {"value": 2.0})]
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2


def test_a_torn_line_is_passed_over_and_not_continued(tmp_path):
    path = tmp_path / "cells.jsonl"
    Journal(path, "this").put(CELL, {"value": 1.0})
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2])
    journal = Journal(path, "this")
    journal.put(OTHER, {"value": 2.0})
    assert Journal(path, "this").entries() == [(CELL, {"value": 1.0}), (OTHER, {"value": 2.0})]
    assert json.loads(path.read_text().splitlines()[-1])["cell"] == OTHER


def test_a_line_that_is_being_written_is_found_when_it_is_whole(tmp_path):
    path = tmp_path / "cells.jsonl"
    Journal(path, "this").put(CELL, {"value": 1.0})
    whole = path.read_text()
    path.write_text(whole[:20])
    journal = Journal(path, "this")
    assert journal.get(CELL) is None
    path.write_text(whole)
    assert journal.get(CELL) == {"value": 1.0}
