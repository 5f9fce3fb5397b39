import pytest
import torch

from nestling.engine.config import ModelConfig
from nestling.engine.model import Model
from nestling.engine.tokenizer import Tokenizer
from nestling.engine.weights import Weights
from nestling.jobs.bundle import Bundle
from nestling.jobs.probe import ProbeOptions, probe
from nestling.jobs.probe_env import JailedOpener
from nestling.jobs.template import EXACT_REWARD, TASKSET_PATH, template_files


@pytest.fixture(scope="module")
def model():
    words = Tokenizer.closed([chr(code) for code in range(32, 127)])
    config = ModelConfig(
        vocab_size=words.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=1024,
    )
    weights = Weights.init(config, 1, torch.Generator().manual_seed(0))
    return Model(config=config, weights=weights, tokenizer=words)


@pytest.fixture(scope="module")
def opener(jail, zygote):
    return JailedOpener(jail=jail, starter=zygote)


def job(settings, reward=EXACT_REWARD):
    files = template_files("ledger")
    files["job.toml"] = f'base_model = "nano"\n\n[prime_rl]\n{settings}'
    files[TASKSET_PATH] = files[TASKSET_PATH].replace("= 512", "= 48").replace(EXACT_REWARD, reward)
    return Bundle.from_files({path: text.encode() for path, text in files.items()})


@pytest.mark.long
def test_real_rollouts_give_the_prediction(model, opener):
    bundle = job("max_turns = 8\nmax_tokens = 16\n")
    first = probe(bundle, "ledger", env_opener=opener, model=model)
    assert first.lines() == []
    assert first.predicted == probe(bundle, "ledger", env_opener=opener, model=model).predicted
    scripted = probe(bundle, "ledger", env_opener=opener)
    assert first.predicted != scripted.predicted


def test_prompts_that_leave_no_room_for_a_turn_are_refused(model, opener):
    bundle = job("seq_len = 128\n")
    report = probe(bundle, "ledger", env_opener=opener, model=model)
    assert report.problems[0].code == "rollout.seq_len"
    assert "with max_tokens 64 that is over 128" in report.lines()[0]
    assert report.predicted is None


def test_a_reward_that_fails_on_odd_text_is_refused(model, opener):
    reward = (
        "    @vf.reward(weight=1.0)\n"
        "    async def correct(self, trace):\n"
        "        said = trace.last_reply\n"
        '        if said and "ANSWER" not in said and said != self.data.prompt:\n'
        '            raise ValueError("odd")\n'
        "        return float(parse_answer(said) == self.data.answer)\n"
    )
    options = ProbeOptions(model_rollouts=8)
    bundle = job("max_turns = 8\nmax_tokens = 16\n", reward)
    report = probe(bundle, "ledger", env_opener=opener, model=model, options=options)
    assert report.problems[0].code == "rollout.error"
    assert "odd" in report.lines()[0]
