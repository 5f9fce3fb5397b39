import re

import pytest

from nestling.agent.episode_result import EpisodeResult
from nestling.agent.reward import RewardWeights, compute_terms
from nestling.jobs.outcome import Outcome
from nestling.report.arithmetic import formula_lines, reward_lines

WEIGHTS = RewardWeights()


def result(kind="seed", *, post=0.6, best=0.4, valid=2, submitted=True, dies=False):
    outcome = None
    if valid:
        outcome = Outcome(
            job_hash="h", family="ledger", base_model="micro",
            status="failed" if dies else "succeeded", pre=best, best_pre=best,
            post=None if dies else post, uplift=None if dies else post - best,
            uplift_ci=None if dies else (post - best - 0.05, post - best + 0.05),
        )  # fmt: skip
    terms = compute_terms(
        outcome, valid_attempt=valid, submitted=submitted, budget_share=0.25, weights=WEIGHTS
    )
    return EpisodeResult(
        family="ledger", task_id="t", task_seed=0, policy_seed=0, reward_kind=kind,
        reward=terms[kind].total, terms=terms, outcome=outcome, valid_attempt=valid,
        outcome_code="job_succeeded" if valid and not dies else "max_turns",
    )  # fmt: skip


def worked_out(line):
    """Both sides of the last equation of a line."""
    parts = line.split(": ")[0].split(" = ")
    sides = [re.sub("×", "*", part).replace("−", "-") for part in parts[-2:]]
    return [eval(side, {}) for side in sides]


@pytest.mark.parametrize("post", [0.6, 0.4, 0.1, 1.0])
def test_seed_arithmetic_adds_up(post):
    one = result(post=post)
    lines = reward_lines(one, WEIGHTS)
    assert lines[0] == "validation = 0.8000: attempt 2 was accepted"
    for line in lines:
        if " × " in line or " / 0" in line:
            left, right = worked_out(line)
            assert left == pytest.approx(right, abs=2e-4), line
    assert worked_out(lines[-1])[1] == pytest.approx(one.reward, abs=1e-4)
    assert not any("differs" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"valid": None, "submitted": False}, "no readable submission: reward = -0.1000"),
        ({"valid": None}, "no submission was accepted"),
        ({"dies": True}, "no trained model was scored"),
        ({"post": 0.4}, "post equals best_pre"),
        ({"post": 0.1}, "/ best_pre = (0.1000 − 0.4000) / 0.4000 = -0.7500"),
        ({"kind": "paired"}, "95 % interval [+0.1500, +0.2500]"),
        ({"kind": "paired", "dies": True}, "no trained model was scored"),
    ],
)
def test_every_ending_is_explained(settings, words):
    assert words in "\n".join(reward_lines(result(**settings), WEIGHTS))


def test_other_weights_are_noticed():
    other = RewardWeights(validation=0.1, quality=0.85, speed=0.05)
    assert "used other weights" in reward_lines(result(), other)[-1]


def test_rule_is_rendered_from_the_weights():
    text = "\n".join(formula_lines(RewardWeights(by_attempt=(1.0, 0.5), post_share=0.4), "seed"))
    assert "1 at attempt 1, 0.5 at attempt 2" in text
    assert "0.4 × post + 0.6 × uplift_term" in text
    assert "nearer to 0" in "\n".join(formula_lines(WEIGHTS, "paired"))
