"""Stands in for `vllm serve`: its arguments, its routes, and a refusal of whatever vLLM does not document.

It samples nothing: the first turn of a conversation is a call, the second an answer. STANDIN_FOLDER holds what it was
asked (`asked.jsonl`) and, in `die_at`, after how many turns it dies, once.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).parent))
from vllm_fields import FLAGS, SWITCHES, problems

FOLDER = Path(os.environ.get("STANDIN_FOLDER", "."))
LOCK = Lock()
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print("0.0.0 (stand-in)")
        return
    command, model, *rest = sys.argv[1:]
    assert command == "serve", command
    given = {}
    while rest:
        flag = rest.pop(0)
        assert flag in FLAGS | SWITCHES, flag
        given[flag] = rest.pop(0) if flag in FLAGS else True
    assert Path(model, "config.json").is_file(), model
    assert Path(model, "model.safetensors").is_file(), model
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    Handler.names = {given["--served-model-name"]}
    note({"started": model, **given})
    ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    names: ClassVar[set] = set()
    num_turns = 0

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": [{"id": name} for name in sorted(self.names)]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            if self.path == "/v1/chat/completions":
                self.turn(body)
            elif self.path == "/v1/load_lora_adapter":
                at = Path(body["lora_path"])
                assert {"adapter_model.safetensors", "adapter_config.json"} <= {
                    one.name for one in at.iterdir()
                }
                self.names.add(body["lora_name"])
                note({"loaded": body["lora_name"]})
                self.reply(200, {})
            elif self.path == "/v1/unload_lora_adapter":
                self.names.discard(body["lora_name"])
                note({"unloaded": body["lora_name"]})
                self.reply(200, {})
            else:
                self.reply(404, {})

    def turn(self, body: dict) -> None:
        wrong = problems(body)
        if wrong or body["model"] not in self.names:
            self.reply(400, {"error": {"message": f"{wrong} {body['model']}"}})
            return
        die_at = FOLDER / "die_at"
        if die_at.is_file() and type(self).num_turns >= int(die_at.read_text()):
            die_at.unlink()
            os._exit(9)
        type(self).num_turns += 1
        note({"asked": body})
        is_first = (
            body["messages"][-1]["role"] == "user"
            and "tool_response" not in body["messages"][-1]["content"]
        )
        message = {"role": "assistant", "content": CALL if is_first else "ANSWER: 7"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 9}})

    def reply(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def note(value: dict) -> None:
    with (FOLDER / "asked.jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
