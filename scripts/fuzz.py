"""Random programs against the matcher: what means a fused site may not be missed, nothing may differ from eager.

    python scripts/fuzz.py [--programs 10000] [--seed 0] [--json FILE]
    python scripts/fuzz.py --only 4711          one program again, described in full

Half of the programs are equivalent spellings of the gated norm, the reshapes and the quantisation: each has to fuse,
to eager's bytes. The others have one thing changed: they may fuse or not, and have to be eager's. Each is traced, fused
and interpreted (no Inductor), on a CPU. Exit status 1 where one was missed or differs.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import platform
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import gdn_backend  # noqa: E402
from tests.graph.changes import changed  # noqa: E402
from tests.graph.program import Program  # noqa: E402
from tests.graph.programs import equivalent  # noqa: E402
from tests.graph.trial import Trial, try_program  # noqa: E402

RESULTS = ROOT / "scripts" / "results" / "fuzz.json"
KINDS = ("equivalent", "changed")


@dataclass
class Tally:
    """What came of the programs of one kind."""

    tried: int = 0
    fused: int = 0
    invalid: int = 0  # eager does not run them
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)  # of the misses

    def add(self, trial: Trial) -> None:
        self.tried += trial.valid
        self.invalid += not trial.valid
        self.fused += trial.fused > 0
        self.reasons.update(trial.reasons)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "fused": self.fused,
            "not_valid_in_eager": self.invalid,
            "missed": dict(self.reasons.most_common()),
        }


def make_program(number: int) -> tuple[str, Program]:
    """The program of this number and its kind; always the same."""
    pick = random.Random(number).choice
    program = equivalent(pick)
    if number % 2 == 0:
        return "equivalent", program
    return "changed", changed(program, pick)


def try_number(number: int) -> tuple[str, Program, Trial]:
    """Make and run one program; a crash of the passes is a fault as well."""
    kind, program = make_program(number)
    try:
        return kind, program, try_program(program, must_fuse=kind == "equivalent")
    except Exception:
        return kind, program, Trial(0, (), traceback.format_exc(limit=-4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="number of the first program")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this program alone; writes nothing")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the counts go")
    options = parser.parse_args()
    if options.only is not None:
        kind, program, trial = try_number(options.only)
        print(kind, program.describe(), trial, sep="\n")
        return int(bool(trial.fault))
    tallies = {kind: Tally() for kind in KINDS}
    faults: list[str] = []
    start = time.perf_counter()
    numbers = itertools.count(options.seed)
    for _ in track(range(options.programs), description="programs"):
        trial = Trial(0, (), "", valid=False)
        while not trial.valid:  # a program that eager does not run counts for nothing
            number = next(numbers)
            kind, program, trial = try_number(number)
            tallies[kind].add(trial)
        if trial.fault:
            faults.append(f"--only {number}: {trial.fault}")
            print(faults[-1], program.describe(), sep="\n", flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": f"CPU, {platform.machine()}",
        "versions": {"gdn_backend": gdn_backend.__version__, "torch": torch.__version__},
        "first_program": options.seed,
        "seconds": round(time.perf_counter() - start, 1),
        **{kind: tally.to_dict() for kind, tally in tallies.items()},
        "faults": faults,
    }
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    for kind, tally in tallies.items():
        print(f"{kind}: {tally.tried} tried, {tally.fused} fused, {tally.invalid} that eager does not run")
    print(f"{len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
