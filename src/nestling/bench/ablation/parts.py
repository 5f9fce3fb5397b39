"""The parts of a job, and one job with a part of another.

- `base`: `base_model` of job.toml.
- `config`: the tables `[prime_rl]` and `[sft]` of job.toml. Two jobs agree on it when all values are equal, written or
  by default.
- `rubric`: the `@vf.reward` methods of the task class, with the methods of that class that they call on `self` and the
  imports and module-level definitions that they use.
- `data`: everything else that makes the rows and the tools of a rollout: the rest of `environment/`, `data/`, and
  the table `[env]`.
- `all`: the whole job.

Code is compared by its syntax tree, so that comments and spacing are no difference.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Final, Literal, get_args

from nestling.bench.ablation.rubric_code import RubricCode, find_rubric, graft
from nestling.core.errors import JobRejectedError
from nestling.jobs.bounds import SMALL, Bounds
from nestling.jobs.bundle import Bundle
from nestling.jobs.manifest import JobManifest, parse_manifest, render_manifest

__all__ = ["PARTS", "Part", "with_part"]

Part = Literal["base", "data", "rubric", "config", "all"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)


def with_part(job: Bundle, template: Bundle, part: Part, bounds: Bounds = SMALL) -> Bundle:
    """`job` with one part of `template`; `job` itself when the two agree on that part.

    Raises:
        JobRejectedError: the parts cannot be taken apart (`ablation.*`), or do not make a job together.
    """
    if all(
        _agree(job, template, one, bounds) for one in (PARTS[:-1] if part == "all" else (part,))
    ):
        return job
    if part == "all":
        return template
    own, other = job.manifest(bounds), template.manifest(bounds)
    if part == "base":
        return _joined(job.files, own.model_copy(update={"base_model": other.base_model}), bounds)
    if part == "config":
        tables = {key: getattr(other, key) for key in ("prime_rl", "explicit_keys", "sft")}
        return _joined(job.files, own.model_copy(update=tables), bounds)
    host, donor = (job, template) if part == "rubric" else (template, job)
    rubric = find_rubric(host.files)
    code = graft(rubric, find_rubric(donor.files))
    env = own.env if part == "rubric" else other.env
    files = dict(host.files) | {rubric.path: code.encode()}
    return _joined(files, own.model_copy(update={"env": env}), bounds)


def _joined(files: Mapping[str, bytes], manifest: JobManifest, bounds: Bounds) -> Bundle:
    text = render_manifest(manifest)
    parse_manifest(text, bounds)
    return Bundle.from_files(dict(files) | {"job.toml": text.encode()})


def _agree(job: Bundle, template: Bundle, part: Part, bounds: Bounds) -> bool:
    own, other = job.manifest(bounds), template.manifest(bounds)
    if part == "base":
        return own.base_model == other.base_model
    if part == "config":
        return (own.prime_rl, own.sft) == (other.prime_rl, other.sft)
    try:
        ours, theirs = find_rubric(job.files), find_rubric(template.files)
    except JobRejectedError:
        return False
    if part == "rubric":
        return ours.used() == theirs.used()
    return own.env == other.env and _rest(job, ours) == _rest(template, theirs)


def _rest(job: Bundle, rubric: RubricCode) -> dict[str, str | bytes]:
    """All files but job.toml without the rubric, in a form that can be compared."""
    rest: dict[str, str | bytes] = {}
    for path, data in job.files.items():
        if path == rubric.path:
            rest[path] = rubric.without()
        elif path.endswith(".py"):
            with warnings.catch_warnings():  # an odd escape in a string is no fault
                warnings.simplefilter("ignore")
                rest[path] = ast.dump(ast.parse(data))
        elif path != "job.toml":
            rest[path] = data
    return rest
