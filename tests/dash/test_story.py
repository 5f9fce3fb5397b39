from nestling.core.rundir import RunDir
from nestling.dash.story import read_story, said_in
from nestling.engine.chat import render_call
from nestling.jobs.outcome import SampleRollout
from nestling.report.gather import gather
from nestling.store import RunStore


def test_submissions_are_told_apart_from_what_lay_there(runs):
    folder = RunDir(runs / "calm")
    trained = [one for one in gather(folder.root).train_episodes if one.is_job_done]
    row = next(one for one in trained if one.valid_attempt == 1)
    with RunStore.open_reader(folder.database) as store:
        story = read_story(folder, store, row.id)
    accepted = story.submissions[-1]
    assert accepted.ok
    changes = {one.path: one.change for one in accepted.diffs}
    assert changes["job.toml"] == "new"
    assert changes["environment/__init__.py"] == "changed"
    assert changes["environment/taskset.py"] == "gone"
    lines = {(line.kind, line.text) for diff in accepted.diffs for line in diff.lines}
    assert ("add", f'base_model = "{row.base_model}"') in lines
    assert ("remove", "from environment.taskset import Taskset") in lines
    assert accepted.settings["max_steps"] == "8"


def test_a_running_episode_shows_its_turns_as_they_come(tmp_path):
    folder = RunDir.create(tmp_path / "run")
    with RunStore(folder.database) as store:
        store.progress.open_group(
            "g", purpose="train", step=1, family="ledger", seed=0, size=2, learner_version=0
        )
        for idx, one in enumerate(("e", "f")):
            store.episodes.start(one, group_id="g", idx=idx, family="ledger", policy="p", seed=0)
        call = render_call("write_file", {"path": "job.toml", "content": "<b>\n"})
        store.episodes.add_turn(
            "e", 0, text=f"Here.\n{call}<|im_end|>", ids=[1, 2], logprobs=[0, 0]
        )
        store.episodes.add_observation("e", 0, "ok")
        store.episodes.add_turn("e", 1, text="<tool_call>{}")
        store.events.append("episode.died", "f", {"reason": "worker lost"})
        store.episodes.fail("f", "worker lost again")
        story, dead = (read_story(folder, store, one) for one in ("e", "f"))
    first, second = story.turns
    assert (first.number, first.tool, first.text, first.tokens) == (1, "write_file", "Here.", 2)
    assert first.arguments == {"path": "job.toml", "content": "<b>\n"}
    assert first.answer == "ok"
    assert second.tool is None
    assert second.problem
    assert second.answer is None
    assert story.result is None
    assert dead.died == ("worker lost", "worker lost again")
    assert "broke down" in dead.verdict


def test_rollouts_of_the_small_model_are_split_into_messages():
    text = (
        "<|im_start|>system\nUse tools.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\nhm<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nANSWER: 2<|im_end|>"
    )
    said = said_in(SampleRollout(text=text, reward=1.0))
    assert [(one.role, one.text) for one in said] == [
        ("system", "Use tools."),
        ("user", "1+1?"),
        ("assistant", "hm"),
        ("tool", "2"),
        ("assistant", "ANSWER: 2"),
    ]
    plain = said_in(SampleRollout(text="no markup", reward=0.0))
    assert [(one.role, one.text) for one in plain] == [("", "no markup")]
