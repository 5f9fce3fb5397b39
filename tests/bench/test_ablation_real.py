"""Parts swapped, trained and paid for real, with jobs of one small step."""

from pathlib import Path

import pytest

from nestling.agent.rubrics import RUBRICS, render_rubric
from nestling.bench.ablation.accepted import Accepted, AcceptedJob
from nestling.bench.ablation.measure import ablate
from nestling.config import load_recipe
from nestling.core.errors import ConfigError
from nestling.core.seeds import stream
from nestling.inner.spread import with_settings
from nestling.jobs.bundle import Bundle
from nestling.jobs.template import EXACT_REWARD, TASKSET_PATH, template_job

TINY = ("inner.eval_items=8", "inner.leak_items=16", "fleet.workers=1", "inner.seed=3")
FORM = render_rubric(RUBRICS["formed"], stream(0, "test"))


def job(name: str, *edits: tuple[str, str], base: str = "nano") -> AcceptedJob:
    template = with_settings(
        template_job("ledger"), base_model=base, max_steps=1, batch_size=16, group_size=8
    )
    text = template.files[TASKSET_PATH].decode()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    bundle = Bundle.from_files({**template.files, TASKSET_PATH: text.encode()})
    return AcceptedJob(episode_id=name, task=name, family="ledger", valid_attempt=2, bundle=bundle)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_parts_are_trained_paid_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NESTLING_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shared = EXACT_REWARD.replace("== self.data.answer)", "== self.data.answer) * LO")
    configured = EXACT_REWARD.replace(
        "== self.data.answer)", "== self.data.answer) * self.config.pay"
    )
    jobs = (
        job("plain", ("2, 5", "1, 2"), (EXACT_REWARD, FORM)),
        job("twin", ("2, 5", "1, 2"), (EXACT_REWARD, FORM)),
        job("shares a name", ("2, 5", "1, 2"), (EXACT_REWARD, shared)),
        job(
            "needs its own rows",
            (
                "    tools: vf.ToolsetConfig =",
                "    pay: float = 1.0\n    tools: vf.ToolsetConfig =",
            ),
            (EXACT_REWARD, configured),
        ),
    )
    accepted = Accepted(whose="four jobs", jobs=jobs, num_episodes=4, num_accepted=4, not_kept=0)
    config = load_recipe(None, TINY)
    trained: list[str] = []

    async def measured():
        return await ablate(
            config,
            accepted,
            tmp_path / "ablation",
            told=lambda family, bundle, result: trained.append(bundle.job_hash),
            parts=("data", "rubric"),
        )

    found = await measured()
    assert len(trained) == len(set(trained)), "equal jobs are trained once"
    swaps = {(one["episode_id"], one["part"]): one for one in found.runs}
    for part in ("data", "rubric"):
        plain, twin = swaps["plain", part], swaps["twin", part]
        assert (plain["own"], plain["swapped"]) == (twin["own"], twin["swapped"])
        assert plain["not_runnable"] == ""
        assert plain["own"][0]["validation"] == plain["swapped"][0]["validation"] == 0.8
        assert plain["own"][0]["speed"] == pytest.approx(1 - 16 / 1024)
    assert swaps["shares a name", "data"]["not_runnable"] == "ablation.inseparable"
    assert swaps["needs its own rows", "data"]["not_runnable"].startswith("rubric.")
    assert swaps["needs its own rows", "rubric"]["not_runnable"] == ""
    data = found.figures["all"]["data"]
    assert (data["jobs"], data["n"], data["clusters"]) == (4, 2, 1)
    assert sum(data["not_runnable"].values()) == 2
    assert sum(data["terms"].values()) == pytest.approx(data["earned"])

    assert await measured() == found, "what was trained is kept"
    other = config.model_copy(
        update={"reward": config.reward.model_copy(update={"kind": "paired"})}
    )
    with pytest.raises(ConfigError, match="other settings"):
        await ablate(other, accepted, tmp_path / "ablation", told=lambda *_: None)
