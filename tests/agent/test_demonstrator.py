"""The demonstrator in real episodes: the paper probe says what the real probe says."""

from __future__ import annotations

import asyncio
import re

import pytest

from nestling.agent.demonstrator import Demonstrator
from nestling.agent.episode import EpisodeTask, run_episode
from nestling.agent.episode_result import EpisodeResult
from nestling.agent.paper_probe import PaperRunner
from nestling.agent.warm_start import Corpus, WarmStartPlan, encode_episode, make_corpus
from nestling.engine.chat import ToolCall, parse_turn
from nestling.engine.tokenizer import Tokenizer
from nestling.families.registry import ALL, get
from nestling.jobs.bundle import Bundle
from nestling.jobs.env_zygote import Zygote
from nestling.jobs.jail import Jail
from nestling.jobs.probe import ProbeReport, probe
from nestling.jobs.probe_env import JailedOpener

pytestmark = pytest.mark.long


async def _play(index: int, runner: PaperRunner) -> EpisodeResult:
    task = EpisodeTask(
        family=get(ALL[index % len(ALL)]),
        task_id=f"demo-{index}",
        task_seed=index,
        policy_seed=1000 + index,
    )
    return await run_episode(task, Demonstrator(), runner)


class _RealProbe(PaperRunner):
    def __init__(self, opener: JailedOpener) -> None:
        super().__init__()
        self._opener = opener

    async def check(self, bundle: Bundle, family: str) -> ProbeReport:
        return probe(bundle, family, env_opener=self._opener)


def _shape(result: EpisodeResult) -> list[str]:
    """Results of all tool calls with their figures masked."""
    return [re.sub(r"[\d.]+", "#", turn.result or "") for turn in result.turns]


@pytest.fixture(scope="module")
def played() -> list[EpisodeResult]:
    async def play() -> list[EpisodeResult]:
        return [await _play(index, PaperRunner()) for index in range(150)]

    return asyncio.run(play())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Tokenizer]:
    folder = tmp_path_factory.mktemp("corpus")
    corpus = make_corpus(WarmStartPlan(episodes=60), folder)
    return corpus, Tokenizer.load(folder / "agent")


@pytest.mark.slow
async def test_paper_probe_agrees_with_the_real_probe() -> None:
    with Zygote(Jail()) as zygote:
        real = _RealProbe(JailedOpener(starter=zygote))
        for index in range(60):
            assert _shape(await _play(index, real)) == _shape(await _play(index, PaperRunner()))


def test_demonstrator_writes_calls_that_parse_and_never_hits_a_tool_error(
    played: list[EpisodeResult],
) -> None:
    for result in played:
        assert all(isinstance(parse_turn(turn.text), ToolCall) for turn in result.turns[2:])
        assert not [turn for turn in result.turns if (turn.result or "").startswith("error")]


def test_demonstrator_is_often_wrong_at_first_and_mostly_right_in_the_end(
    played: list[EpisodeResult],
) -> None:
    first = sum(result.valid_attempt == 1 for result in played) / len(played)
    ever = sum(result.valid_attempt is not None for result in played) / len(played)
    assert 0.2 < first < 0.6
    assert ever > 0.7


def test_nearly_every_demonstration_writes_settings(played: list[EpisodeResult]) -> None:
    with_table = sum(any("[prime_rl]" in turn.text for turn in one.turns[2:]) for one in played)
    assert with_table / len(played) > 0.9


def test_who_saw_the_scores_takes_the_higher_base_more_often() -> None:
    async def play() -> list[EpisodeResult]:
        scores = ({"nano": 0.6, "micro": 0.01}, {"nano": 0.4, "micro": 0.45})
        return [await _play(index, PaperRunner(scores[index % 2])) for index in range(400)]

    agreed: dict[bool, list[bool]] = {True: [], False: []}
    for index, result in enumerate(asyncio.run(play())):
        written = "\n".join(turn.text for turn in result.turns[2:])
        if "base_model" in written:
            better = ("nano", "micro")[index % 2]
            agreed["get_baseline_scores" in written].append(f'base_model = \\"{better}' in written)
    looked, blind = agreed[True], agreed[False]
    assert 0.88 < sum(looked) / len(looked) < 0.99
    assert 0.38 < sum(blind) / len(blind) < 0.62


def test_the_warm_start_shows_no_held_out_family(corpus: tuple[Corpus, Tokenizer]) -> None:
    rows, tokenizer = corpus
    texts = [tokenizer.decode(rows.row(index)[0]) for index in range(len(rows))]
    assert any("family: ledger" in text for text in texts)
    assert not [text for text in texts if "family: triage" in text]


def test_corpus_rows_are_what_an_episode_feeds(corpus: tuple[Corpus, Tokenizer]) -> None:
    rows, tokenizer = corpus
    assert len(rows) == 60
    for index in (0, 17, 59):
        ids, sampled = rows.row(index)
        text = tokenizer.decode(ids)
        assert text.startswith("<|im_start|>system\nYou write training jobs")
        said = tokenizer.decode([token for token, flag in zip(ids, sampled, strict=True) if flag])
        assert "<tool_response>" not in said
        assert said.endswith("<|im_end|>")


def test_encoding_an_episode_round_trips_its_text(
    corpus: tuple[Corpus, Tokenizer], played: list[EpisodeResult]
) -> None:
    tokenizer, turns = corpus[1], played[3].turns
    text = tokenizer.decode(encode_episode(tokenizer, turns)[0])
    for turn in turns:
        assert turn.text in text
