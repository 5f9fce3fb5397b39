from collections.abc import Callable

import pytest

from nestling.core.errors import JobRejectedError
from nestling.inner.run import InnerContext
from nestling.inner.spread import ReferenceJob, SpreadRow, reference_jobs, spread, with_settings
from nestling.jobs.template import template_job

from .conftest import FAMILY, SAME, job


def test_settings_are_replaced_and_removed_and_everything_else_stays() -> None:
    template = template_job("ledger")
    changed = with_settings(template, base_model="nano", lr=3e-3, temperature=None)
    before, after = template.manifest(), changed.manifest()
    assert after.base_model == "nano"
    assert after.prime_rl.lr == 3e-3
    assert set(before.explicit_keys) - set(after.explicit_keys) == {"temperature"}
    assert changed.files["environment/taskset.py"] == template.files["environment/taskset.py"]
    assert changed.job_hash != template.job_hash
    with pytest.raises(JobRejectedError):
        with_settings(template, lr=1.0)


def test_reference_jobs_of_every_template_keep_the_bounds() -> None:
    template = template_job("ledger")
    jobs = reference_jobs(template, base="micro", small_base="nano", rubrics={"format": template})
    assert [one.name for one in jobs] == [
        "template", "lr_too_high", "few_samples", "small_base", "format", "noop",
    ]  # fmt: skip
    manifests = {one.name: one.bundle.manifest() for one in jobs if one.bundle is not None}
    assert manifests["lr_too_high"].prime_rl.lr == 3e-3
    assert manifests["few_samples"].prime_rl.batch_size == 16
    assert manifests["small_base"].base_model == "nano"


@pytest.mark.long
def test_table_holds_every_job_over_its_seeds(make_context: Callable[..., InnerContext]) -> None:
    jobs = {
        FAMILY: [
            ReferenceJob(name="learns", bundle=job(max_steps=2)),
            ReferenceJob(name="dies", bundle=job("import os; os._exit(1)", max_steps=1)),
            ReferenceJob(name="same", bundle=job(SAME, max_steps=1)),
            ReferenceJob(name="noop", bundle=None),
        ]
    }
    logged: list[SpreadRow] = []
    rows = list(spread(jobs, (1, 2), make_context(keep_models=False), logged.append))
    assert rows == logged
    learns, dies, same, noop = rows
    assert (learns.seeds, len(learns.uplifts), learns.failures) == ((1, 2), 2, ())
    assert (learns.settings["max_steps"], noop.settings) == (2, {})
    assert (dies.uplift_mean, dies.uplift_ci, len(dies.failures)) == (None, None, 2)
    assert (same.uplift_mean, same.uplift_ci) == (0.0, (0.0, 0.0))
    assert (noop.uplift_mean, noop.uplift_ci, noop.cpu_s_mean) == (0.0, (0.0, 0.0), 0.0)
