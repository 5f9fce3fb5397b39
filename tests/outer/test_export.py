"""A real run's agent, exported and loaded again."""

import importlib.util
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from nestling.agent.prompt import AgentPrompt
from nestling.agent.token_policy import TokenPolicy
from nestling.bench.agents import model_folder, read_agent
from nestling.config import AgentConfig, RunConfig, load_recipe, recipe_toml
from nestling.core.clock import SystemClock
from nestling.core.errors import ConfigError, ModelError
from nestling.core.seeds import derive_seed
from nestling.engine.checkpoint import load_model, save_model
from nestling.engine.lora import load_adapter
from nestling.engine.model import Model, forward, logits
from nestling.outer.config import EmbeddedConfig, HeldOutConfig, OuterConfig
from nestling.outer.export import Exported, export_agent
from nestling.outer.heldout import Arm, sweep
from nestling.outer.loop import train
from nestling.outer.player import HandleSampler
from nestling.outer.store_log import StoreLog
from nestling.store.group_commit import GroupCommit
from nestling.store.run_store import RunStore
from nestling.wiring.agents import load_agent

from .conftest import TOKENIZER, tiny_model

PROMPT = AgentPrompt(system="ann", user="bob", tool_schemas=(), style="compact", family="ledger")
CARD = "---\nlicense: apache-2.0\n---\n# tiny\n"
OUTER = OuterConfig(
    seed=3,
    steps=2,
    group_size=4,
    max_turn_tokens=6,
    max_total_tokens=90,
    learning_rate=1e-2,
    held_out=HeldOutConfig(every_steps=0, episodes=6, resamples=100),
)


class OneTurn:
    """One turn of at most six tokens; pays the share of them with an even id."""

    def __init__(self, learner, make_result):
        self.learner, self.make_result = learner, make_result

    async def play(self, plan, handle):
        policy = TokenPolicy(
            tokenizer=TOKENIZER,
            sampler=HandleSampler(self.learner, handle, session_prefix=plan.episode_id),
            temperature=0.7,
            max_turn_tokens=6,
            max_total_tokens=90,
        )
        session = policy.begin(PROMPT, plan.policy_seed)
        turn = await session.act()
        session.close()
        share = sum(token % 2 == 0 for token in turn.ids) / len(turn.ids)
        return self.make_result(plan, share, session.trajectory())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    save_model(folder, tiny_model())
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture
def make_run(tmp_path: Path, base: Path, embedded, make_result):
    async def make(lora_rank: int = 0) -> Path:
        run = tmp_path / "run"
        run.mkdir()
        learner_config = EmbeddedConfig(lora_rank=lora_rank)
        config = RunConfig(agent=AgentConfig(model=str(base)), outer=OUTER, learner=learner_config)
        (run / "config.toml").write_text(recipe_toml(config))
        learner = embedded(folder="run/learner", lora_rank=lora_rank)
        with RunStore(run / "run.db") as store, GroupCommit(store) as writer:
            store.set_meta("run.name", "words")
            store.set_meta("run.commit", "0123456789ab")
            log = StoreLog(writer)
            await train(
                OUTER,
                learner=learner,
                player=OneTurn(learner, make_result),
                log=log,
                families=["ledger"],
                clock=SystemClock(),
            )
            await log.sweep_done(2, await measured(log, make_result))
        return run

    return make


async def measured(log, make_result):
    def arm(name, gain):
        async def play(plan):
            return make_result(
                plan, gain + 0.1 * random.Random(derive_seed(plan.task_seed)).random()
            )

        return Arm(name=name, play=play, step=2)

    arms = [arm("untrained", 0.2), arm("step-000002", 0.4)]
    return await sweep(
        arms, ("triage",), config=OUTER.held_out, seed=1, log=log, against=["untrained"]
    )


def export(run: Path, out: Path, base: Path, **more) -> Exported:
    def find(name: str) -> Path:
        assert name == str(base)
        return base

    return export_agent(run, out, find_base=find, **more)


def scores(model: Model) -> torch.Tensor:
    ids = torch.tensor([[[5, 80, 90, 3, 7, 11, 256]]])
    params = model.params()
    with torch.no_grad():
        return logits(params, forward(params, model.config, ids).flatten(1, 2))


async def test_trained_model_comes_back_with_equal_logits(make_run, base, tmp_path) -> None:
    run, out = await make_run(), tmp_path / "out"
    done = export(run, out, base, command="nestling export run --out out")
    assert (done.kind, done.step, done.version) == ("model", 2, 2)
    back, kept = load_model(out), load_model(run / "learner" / "step-000002")
    assert torch.equal(scores(back), scores(kept))
    assert not torch.equal(scores(back), scores(load_model(base)))
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.7
    assert not list(tmp_path.glob(".new-*"))
    # Import back: as an agent to measure, and as the model of a recipe.
    assert read_agent(f"embedded:{out}").folder == out
    assert load_recipe(None, [f"agent.model={out}"]).agent.model == str(out)


async def test_the_card_is_written_from_the_run(make_run, base, tmp_path) -> None:
    run, out = await make_run(), tmp_path / "out"
    export(run, out, base, command="nestling export run --out out")
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    for told in (
        "# words, step 2",
        "2 updates",
        "commit 0123456789ab",
        "8 episodes of its own",
        "nestling export run --out out",
        "learning_rate = 0.01",
        "Licence: apache-2.0",
        "| step-000002 | triage | 6 | 0.4",
        "step-000002 minus untrained, all families: +0.200",
        "n = 6 pairs, p 0.0",
        "Cost of the run's jobs: not recorded",
    ):
        assert told in card
    assert load_recipe(out / "recipe.toml") == load_recipe(run / "config.toml")
    first = tmp_path / "first"
    assert export(run, first, base, step=0).version == 0
    assert torch.equal(scores(load_model(first)), scores(load_model(base)))
    assert "No sweep has measured this agent." in (first / "README.md").read_text()


async def test_adapter_is_a_peft_folder_with_its_base(make_run, base, tmp_path) -> None:
    run, out = await make_run(lora_rank=4), tmp_path / "out"
    done = export(run, out, base)
    assert done.kind == "adapter"
    own = load_model(out / "base")
    adapter = load_adapter(out, own.config)
    assert done.params == adapter.flat.shape[1]
    both = Model(config=own.config, weights=own.weights, tokenizer=own.tokenizer, lora=adapter)
    merged = load_model(out / "merged")
    assert (scores(both) - scores(merged)).abs().max() < 1e-5
    assert (scores(merged) - scores(own)).abs().max() > 1e-4
    assert model_folder(str(out)) == out / "merged"
    assert read_agent(f"embedded:{out}").folder == out / "merged"
    assert "library_name: peft" in (out / "README.md").read_text()
    small = tmp_path / "small"
    export(run, small, base, adapter_only=True)
    assert not (small / "base").exists()
    assert (small / "adapter_model.safetensors").is_file()
    save_model(base, tiny_model(seed=9))
    with pytest.raises(ModelError, match="other weights"):
        export(run, tmp_path / "wrong", base)
    assert not (tmp_path / "wrong").exists()
    shutil.rmtree(base)


async def test_an_agent_trained_with_all_weights_as_the_nearest_adapter(
    make_run, base, tmp_path
) -> None:
    run = await make_run()
    whole = load_model(sorted((run / "learner").glob("step-*"))[-1])
    distance = {}
    for rank in (1, 8):
        out = tmp_path / f"rank-{rank}"
        done = export(
            run,
            out,
            base,
            rank=rank,
            adapter_only=True,
            load_base=lambda one: load_agent(one, "cpu"),
        )
        assert done.kind == "adapter"
        assert {path.name for path in out.iterdir()}.isdisjoint({"base", "merged"})
        assert f"{done.kept:.1%} of what changed" in (out / "README.md").read_text()
        assert model_folder(str(out)) == out
        back = load_agent(out, "cpu")
        distance[rank] = float((back.weights.flat - whole.weights.flat).square().sum())
        change = (whole.weights.flat - load_model(base).weights.flat).square().sum()
        assert distance[rank] / float(change) == pytest.approx(1 - done.kept, abs=1e-3)
    assert 0 < distance[8] < distance[1]
    assert read_agent(f"embedded:{tmp_path / 'rank-1'}").arm.startswith("rank-1-")
    other = tmp_path / "other"
    other.mkdir()
    file = "adapter_model.safetensors"
    shutil.copyfile(tmp_path / "rank-1" / file, other / file)
    with pytest.raises(ModelError, match="names no base model"):
        load_agent(other, "cpu")


async def test_an_adapter_is_not_made_into_another(make_run, base, tmp_path) -> None:
    run = await make_run(lora_rank=4)
    with pytest.raises(ConfigError, match="leave out --rank"):
        export(run, tmp_path / "out", base, rank=2)


async def test_what_cannot_be_exported_is_refused(make_run, base, tmp_path) -> None:
    run, out = await make_run(), tmp_path / "out"
    with pytest.raises(ConfigError, match="expected one of 0, 1, 2"):
        export(run, out, base, step=7)
    out.mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export(run, out, base)
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        export(base, tmp_path / "other", base)


@pytest.mark.parity
async def test_transformers_loads_the_exported_model(make_run, base, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, out = await make_run(), tmp_path / "out"
    export(run, out, base)
    peer = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor([[5, 80, 90, 3, 7, 11, 256]])
    with torch.no_grad():
        theirs = peer(input_ids=ids).logits[0]
    assert (theirs - scores(load_model(out))[0]).abs().max() < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(TOKENIZER.encode("ann 12")) == "ann 12"


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21.2
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
async def test_peft_loads_the_exported_adapter(make_run, base, tmp_path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, out = await make_run(lora_rank=4), tmp_path / "out"
    export(run, out, base)
    peer = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32), out
    )
    ids = torch.tensor([[5, 80, 90, 3, 7, 11, 256]])
    with torch.no_grad():
        theirs = peer(input_ids=ids).logits[0]
    assert (theirs - scores(load_model(out / "merged"))[0]).abs().max() < 1e-4
