"""The claim that matters: with the shipped bases, a good job lifts the hidden score."""

from pathlib import Path

import pytest

from nestling.core.errors import ModelError
from nestling.families import bases
from nestling.families.registry import TRAINING
from nestling.families.splits import EvalSecret
from nestling.inner.baselines import Baselines
from nestling.inner.noop import noop_outcome
from nestling.inner.run import InnerContext, run_job
from nestling.inner.scorers.embedded import EmbeddedScorer
from nestling.inner.trainers.embedded import EmbeddedTrainer
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail
from nestling.jobs.template import template_job


def shipped() -> dict[str, Path]:
    try:
        return {name: bases.get(name).folder for name in bases.names()}
    except ModelError:
        return {}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not shipped(), reason="no base weights in this checkout")
@pytest.mark.parametrize("family", TRAINING)
def test_template_job_lifts_the_hidden_score(
    family: str, jail: Jail, zygote: Zygote, tmp_path: Path
) -> None:
    secret_path = tmp_path / "eval.key"
    EvalSecret.load_or_create(secret_path)
    folders = shipped()
    scorer = EmbeddedScorer(secret_path=secret_path, bases=folders)
    try:
        context = InnerContext(
            trainer=EmbeddedTrainer(jail=jail, starter=zygote),
            scorer=scorer,
            baselines=Baselines(scorer, folders, folder=tmp_path),
            bases=folders,
            work_folder=tmp_path / "work",
        )
        outcome = run_job(template_job(family), family, context, lambda _: None)
        best = context.baselines.best_base(family, "b", context.n).base
        noop = noop_outcome(best, family, context)
    finally:
        scorer.close()
    assert outcome.status == "succeeded"
    assert outcome.uplift >= 0.15
    assert outcome.uplift_ci[0] > 0
    assert outcome.cpu_s < 45
    assert (noop.uplift, noop.uplift_ci) == (0.0, (0.0, 0.0))
