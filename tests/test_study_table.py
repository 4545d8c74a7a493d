"""Tables of studies: what they count, and what they say of it."""

import shutil

from test_study import TOY, put

from normkit.studies import table
from normkit.studies.study import expand


def test_a_copy_beside_the_seeds_is_no_seed(tmp_path):
    cell = expand(TOY, "pocket")[0]
    for seed in (0, 10):
        folder = put(cell, tmp_path, seed)
    for copy in ("seed-0-old", "seed-0.bak", "seed-00", "seed-", "old"):
        shutil.copytree(folder, folder.with_name(copy))
    made = table.collect(TOY, "pocket", tmp_path)
    assert [run["seed"] for run in made["rows"][1]["cells"][0]["runs"]] == [0, 10]
