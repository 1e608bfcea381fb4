"""Generated programs: equivalent spellings fuse to eager's bytes; changed ones are eager's, fused or not.

``scripts/fuzz.py`` runs the same for as long as one likes.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gdn_backend
from tests.conftest import SUMMARY_LINE
from tests.graph.changes import changed
from tests.graph.harness import Passes
from tests.graph.program import Pick
from tests.graph.programs import equivalent
from tests.graph.trial import Trial, compare_compiled, try_program

PROGRAMS = 300  # of each kind
COMPILED = [seed for seed in range(20) if equivalent(random.Random(seed).choice).tokens][2:6]

budget = settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def picker(data: st.DataObject) -> Pick:
    return lambda options: options[data.draw(st.integers(0, len(options) - 1))]


def say(kind: str, trials: list[Trial], record_property: Callable[[str, object], None]) -> None:
    """Puts how many programs were tried into the summary of the run."""
    valid = [trial for trial in trials if trial.valid]
    reasons = collections.Counter(reason for trial in valid for reason in trial.reasons)
    fused = sum(trial.fused > 0 for trial in valid)
    tried = f"{len(valid)} {kind} programs tried, {fused} fused, misses: {dict(reasons.most_common())}"
    record_property(SUMMARY_LINE, tried)


def test_equivalent_programs_fuse(record_property: Callable[[str, object], None]) -> None:
    trials: list[Trial] = []

    @budget
    @given(st.data())
    def check(data: st.DataObject) -> None:
        program = equivalent(picker(data))
        trial = try_program(program, must_fuse=True)
        trials.append(trial)
        assert not trial.fault, f"{trial.fault}\n{program.describe()}"

    check()
    say("equivalent", trials, record_property)
    assert sum(trial.fused for trial in trials) > PROGRAMS / 2


def test_changed_programs_are_eagers(record_property: Callable[[str, object], None]) -> None:
    trials: list[Trial] = []

    @budget
    @given(st.data())
    def check(data: st.DataObject) -> None:
        pick = picker(data)
        program = changed(equivalent(pick), pick)
        trial = try_program(program, must_fuse=False)
        trials.append(trial)
        assert not trial.fault, f"{trial.fault}\n{program.describe()}"

    check()
    say("changed", trials, record_property)
    assert sum(bool(trial.reasons) for trial in trials) > PROGRAMS / 10


@pytest.mark.parametrize("seed", COMPILED)
def test_a_sample_through_inductor(seed: int) -> None:
    program = equivalent(random.Random(seed).choice)
    fault = compare_compiled(program)
    assert not fault, f"{fault}\n{program.describe()}"
    report = gdn_backend.last_report()
    assert report is not None
    assert (report.num_fused, report.num_missed) == (1, 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_quick_trace_shows_what_dynamo_does(seed: int) -> None:
    """The programs above are traced without Dynamo; here its own graphs have to lead to the same findings."""
    pick = random.Random(seed).choice
    program = equivalent(pick)
    program = changed(program, pick) if seed % 2 else program
    program.dynamic = False
    quick = try_program(program, must_fuse=False)
    if not quick.valid:
        pytest.skip("eager does not run it")
    passes = Passes(frozenset({64, 128}))
    with torch.no_grad():
        torch.compile(program.__call__, backend=passes.backend, fullgraph=True, dynamic=False)(*program.make_inputs())
    assert (len(passes.matches), tuple(miss.reason.name for miss in passes.misses)) == (quick.fused, quick.reasons)
