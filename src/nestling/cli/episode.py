"""`nestling episode`: one real episode, its job trained in this process."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nestling.cli.options import (
    AGENT_NAMES,
    family_of,
    json_option,
    print_json,
    recipe,
    room_options,
    say,
)

if TYPE_CHECKING:
    from nestling.agent.episode import EpisodeEvent
    from nestling.agent.episode_result import EpisodeResult
    from nestling.bench.agents import AgentSpec
    from nestling.config import RunConfig
    from nestling.jobs.outcome import StepRecord
    from nestling.outer.plan import EpisodePlan

__all__ = ["command"]


@click.command("episode")
@click.option(
    "--policy",
    required=True,
    metavar="AGENT",
    help=AGENT_NAMES,
)
@click.option("--family", required=True, metavar="NAME", help="What the agent is to teach.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Root of tasks and of the agent's sampling.")  # fmt: skip
@click.option("--show", "is_shown", is_flag=True, help="Print the whole transcript.")
@room_options
@json_option
def command(
    policy: str,
    family: str,
    seed: int,
    is_shown: bool,
    settings: tuple[str, ...],
    unsafe_no_jail: bool,
    as_json: bool,
) -> int:
    """Play one episode: the agent writes a job, the job is trained, the agent is paid.

    Exit code 1 means that the machinery died, whatever the agent did.
    """
    from nestling.bench.agents import read_agent

    name = family_of(family)
    config = recipe(settings, unsafe_no_jail=unsafe_no_jail)
    agent = read_agent(policy)
    try:
        result = asyncio.run(_play(config, agent, _plan(name, seed)))
    except KeyboardInterrupt:
        say("interrupted; nothing was kept, play the episode again")
        return 130
    if is_shown:
        _print_transcript(result)
    _print_result(agent.label, result)
    if as_json:
        print_json(_result_json(agent.label, seed, result))
    return 1 if result.is_fault else 0


async def _play(config: RunConfig, agent: AgentSpec, plan: EpisodePlan) -> EpisodeResult:
    from nestling.bench.agents import open_agent
    from nestling.bench.room import RoomRunner, room_here

    with (
        tempfile.TemporaryDirectory(prefix="nestling-agent-") as scratch,
        room_here(config) as room,
    ):
        runner = RoomRunner(room, _say_step)
        try:
            async with open_agent(
                agent, config, Path(scratch), lambda _: runner, events=_say_event
            ) as play:
                return await play(plan)
        finally:
            runner.close()


def _plan(family: str, seed: int) -> EpisodePlan:
    from nestling.core.seeds import derive_seed
    from nestling.outer.plan import EpisodePlan

    return EpisodePlan(
        episode_id=f"episode/{family}/{seed}",
        group_id=f"episode/{family}",
        member=0,
        family=family,
        task_seed=derive_seed(seed, "episode-task", family),
        policy_seed=derive_seed(seed, "episode-policy", family),
    )


def _say_event(event: EpisodeEvent) -> None:
    say(f"{event.kind}: {event.detail}")


def _say_step(step: StepRecord) -> None:
    say(f"  training step {step.step + 1}: job's own reward {step.reward_mean:.3f}")


def _print_transcript(result: EpisodeResult) -> None:
    for turn in result.turns:
        click.echo(f"--- {turn.role}")
        click.echo(turn.text)
        if turn.result is not None:
            click.echo(f"--- {turn.tool or 'error'} answered")
            click.echo(turn.result)
    click.echo("---")


def _print_result(policy: str, result: EpisodeResult) -> None:
    terms = result.terms[result.reward_kind]
    detail = f" ({result.detail})" if result.detail else ""
    click.echo(f"{policy} on {result.family}: {result.outcome_code}{detail}")
    click.echo(
        f"reward     {result.reward:.3f} = validation {terms.validation:.2f}, "
        f"quality {terms.quality:+.3f}, speed {terms.speed:.2f}"
    )
    valid = "none valid" if result.valid_attempt is None else f"number {result.valid_attempt} valid"
    click.echo(f"attempts   {len(result.attempts)}, {valid}")
    job = result.outcome
    if job is not None and job.uplift is not None and job.post is not None:
        click.echo(f"job        {job.base_model}: {job.post:.3f}, uplift {job.uplift:+.3f}")
    click.echo(
        f"turns      {result.num_turns}, {result.sampled_tokens} tokens, {result.seconds:.1f} s"
    )


def _result_json(policy: str, seed: int, result: EpisodeResult) -> dict[str, Any]:
    terms = result.terms[result.reward_kind]
    job = result.outcome
    return {
        "policy": policy,
        "family": result.family,
        "seed": seed,
        "reward": result.reward,
        "reward_kind": result.reward_kind,
        "terms": {
            "validation": terms.validation,
            "quality": terms.quality,
            "speed": terms.speed,
        },
        "rewards": {kind: one.total for kind, one in result.terms.items()},
        "attempts": len(result.attempts),
        "valid_attempt": result.valid_attempt,
        "outcome": result.outcome_code,
        "detail": result.detail,
        "turns": result.num_turns,
        "tokens": result.sampled_tokens,
        "seconds": result.seconds,
        "job": job.model_dump(mode="json", exclude={"steps"}) if job else None,
    }
