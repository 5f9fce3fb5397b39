"""Stands in for prime-rl's `rl @ rl.toml`: the same folders, files, markers and exit codes, real tensors, no GPU.

Layout and texts are those of commit 559b447. It imports the job's package by its id, as prime-rl does, loads the
base model that rl.toml names and really moves its weights. STANDIN_FAULT names what goes wrong.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

FAULT = os.environ.get("STANDIN_FAULT", "")
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main() -> None:
    assert sys.argv[1] == "@", sys.argv
    config = tomllib.loads(Path(sys.argv[2]).read_text())
    source = config["orchestrator"]["train"]["source"][0]
    if FAULT == "config":
        sys.exit("1 validation error for RLConfig\ntrainer.optim.lr\n  Input should be >= 0")
    importlib.import_module(source["env"]["taskset"]["id"])
    run = Path(config["output_dir"]) / config["run"]["name"]
    if run.exists():
        raise FileExistsError(
            f"Run directory '{run}' already contains artifacts from a previous run."
        )
    logs = run / "logs" / "attempt_1"
    (logs / "envs" / "train").mkdir(parents=True)
    (run / "logs" / "latest").symlink_to("attempt_1")
    (run / "configs").mkdir()
    (run / "configs" / "orchestrator.json").write_text(json.dumps(config["orchestrator"]))
    print("INFO Starting inference on GPU(s)", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    for name in ("trainer", "orchestrator", "inference", "envs/train/job"):
        (logs / f"{name}.log").write_text(f"INFO {name} starts\n")
    spoil(logs)
    train(config, run, logs)
    print("SUCCESS Training finished!")


def spoil(logs: Path) -> None:
    """Failures before the first step."""
    if FAULT == "env_import":
        say(logs, "envs/train/job", "ModuleNotFoundError: No module named 'pandas'")
        die("Train env server job failed with exit code 1")
    if FAULT == "env_crash":
        die("Train env server job failed with exit code -11")
    if FAULT == "install":
        say(logs, "inference", "ImportError: libcudart.so.12: cannot open shared object file")
        die("Inference failed with exit code 1")
    if FAULT == "starved":
        text = "8 consecutive empty train batches — check algorithm credit and task difficulty."
        say(logs, "orchestrator", f"\x1b[31mRuntimeError: {text}\x1b[0m")
        die("Orchestrator failed with exit code 1")
    if (
        FAULT == "stubborn"
    ):  # a session of its own, orphaned, deaf to SIGTERM, and no marker in its environment
        escape = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True, env={{}})"
        subprocess.run([sys.executable, "-c", escape], check=True)
        wait_forever()
    if FAULT in ("hang", "oom_hang"):
        if FAULT == "oom_hang":
            say(
                logs,
                "inference",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            )
        wait_forever()


def train(config: dict, run: Path, logs: Path) -> None:
    """Every step: other weights, rollouts, metrics."""
    import numpy as np
    from safetensors.numpy import load_file

    weights = load_file(Path(config["model"]["name"]) / "model.safetensors")
    lora = config["trainer"].get("model", {}).get("lora")
    rng = np.random.default_rng(0)
    for step in range(config["max_steps"] + 1):
        folder = run / "broadcasts" / f"step_{step}"
        folder.mkdir(parents=True)
        if lora is not None:
            write_adapter(folder, weights, lora, rng, step)
        else:
            scale = 1e-3 if step else 0.0
            for name, one in weights.items():
                weights[name] = (one + scale * rng.standard_normal(one.shape)).astype(np.float32)
            write_shards(folder, weights)
        if FAULT != "unstable" or step < config["max_steps"]:
            (folder / "STABLE").touch()
        if step:
            rollouts(run, step)
            metrics(run, step)
        if step == 1:
            break_off(logs)


def write_shards(folder: Path, weights: dict) -> None:
    from safetensors.numpy import save_file

    if FAULT == "nan":
        weights["model.norm.weight"][0] = float("nan")
    names = sorted(weights)
    shards = {"00001": names[:3], "00002": names[3:]}
    index = {}
    for number, held in shards.items():
        file = f"model-{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in held}, folder / file)
        index |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_adapter(folder: Path, weights: dict, lora: dict, rng, step: int) -> None:
    """As prime-rl names them: without PEFT's prefix."""
    from safetensors.numpy import save_file

    rank = 3 if FAULT == "rank" else lora["rank"]
    adapter = {}
    for name, one in weights.items():
        if one.ndim == 2 and "proj" in name:
            at = name.removesuffix(".weight")
            up = step * 1e-3 * rng.standard_normal((one.shape[0], rank))
            adapter[f"{at}.lora_A.weight"] = rng.standard_normal((rank, one.shape[1])).astype("f4")
            adapter[f"{at}.lora_B.weight"] = up.astype("f4")
    save_file(adapter, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in adapter}),
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))


def break_off(logs: Path) -> None:
    """Failures after the first step."""
    if FAULT == "oom":
        said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.25 GiB. GPU 0"
        say(logs, "trainer", said)
        die("Trainer failed with exit code 1")
    if FAULT == "inference":
        die("Inference failed with exit code -9")
    if FAULT == "crash":
        say(logs, "trainer", "RuntimeError: NCCL communicator was aborted")
        die("Trainer failed with exit code 1")
    if FAULT == "hang_later":
        wait_forever()


def metrics(run: Path, step: int) -> None:
    """Rows as both components append them; the trainer's last row comes in two halves."""
    rows = [
        {"progress/rollouts": 8, "progress/output_tokens": 320, "train/agg/all/agent/reward/mean": 0.25,
         "train/agg/effective/agent/reward/mean": 0.5, "off_policy/mean": 0.0},
        {"perf/mfu": 10.0},
        {"optim/lr": 1e-4 * step, "optim/grad_norm": 0.5},
        {"loss/mean": -0.25, "entropy/all/mean": 1.0, "mismatch_kl/all/mean": 0.001},
        {"time/step": 2.0, "time/forward_backward": 1.0},
    ]  # fmt: skip
    with (run / "metrics.jsonl").open("a", buffering=1) as file:
        for row in rows[:-1]:
            file.write(json.dumps({"step": step, "time": 0.0, **row}) + "\n")
        file.write("not of the protocol\n")
        text = json.dumps({"step": step, "time": 0.0, **rows[-1]}) + "\n"
        file.write(text[:20])
        file.flush()
        time.sleep(0.03)
        file.write(text[20:])


def rollouts(run: Path, step: int) -> None:
    folder = run / "rollouts" / f"step_{step}" / "train" / "effective"
    folder.mkdir(parents=True)
    with (folder / "traces.jsonl").open("w") as file:
        for group, rewards in (("a", (0.0, 1.0)), ("b", (0.5, 0.5))):
            for reward in rewards:
                nodes = [
                    {"message": {"role": "user", "content": "2 + 2?"}},
                    {"message": {"role": "assistant", "content": "4"}},
                ]
                trace = {"rewards": {"exact": {"score": reward, "weight": 1.0}}, "nodes": nodes}
                file.write(json.dumps({"group": {"id": group}, "traces": [trace]}) + "\n")


def say(logs: Path, name: str, text: str) -> None:
    with (logs / f"{name}.log").open("a") as file:
        file.write(text + "\n")


def die(text: str) -> None:
    print(f"ERROR Error: {text}", flush=True)
    print("ERROR Terminating all processes...", flush=True)
    sys.exit(1)


def wait_forever() -> None:
    print("INFO Waiting for inference", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
