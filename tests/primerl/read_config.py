"""Run by the Python of a prime-rl checkout: each line of input is an rl.toml as JSON, each line of output its verdict."""

import json
import sys

from prime_rl.configs.rl import RLConfig

for line in sys.stdin:
    try:
        config = RLConfig.model_validate(json.loads(line))
    except Exception as error:  # noqa: BLE001 (any refusal is the verdict)
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}))
    else:
        print(json.dumps({"config": config.model_dump(mode="json")}))
